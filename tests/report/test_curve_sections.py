from __future__ import annotations

import re

import msgspec

from rackserve.bench.frontier import Band, Curve, OperatingPoint
from rackserve.bench.metrics import Throughput
from rackserve.report.curve_sections import (
    curves_section,
    frontier_figure,
    hit_figure,
    multiples_section,
    points_table,
    tip_of,
    waiting_figure,
)
from rackserve.report.curves import Cost, compare_curves
from tests.report.pair import NEW, OLD

FULL = Curve(
    "full",
    (
        OperatingPoint(
            "tp<8>", 4, 100, 1110, parts=Throughput(1000, 100, 10), num_gpus=8, ttft_p50_ms=50, ttft_p90_ms=250, hit_rate=0.9
        ),
        OperatingPoint("dep2", 64, 40, 4440, parts=Throughput(4000, 400, 40), trust="not calibrated", valid=False),
    ),
)


def test_the_frontier_is_drawn_by_each_throughput_and_begins_with_output_not_with_the_sum() -> None:
    page = frontier_figure([FULL])
    assert re.findall(r'value="(\w+)"( checked| disabled)?', page) == [
        ("output", " checked"), ("uncached", ""), ("cached", ""), ("total", ""),
    ]  # fmt: skip
    assert re.findall(r'class="panel( other)?" data-measure="(\w+)"', page) == [
        ("", "output"), (" other", "uncached"), (" other", "cached"), (" other", "total"),
    ]  # fmt: skip
    assert "all three, cached input included" in page


def test_where_only_the_sum_is_known_it_alone_can_be_chosen() -> None:
    page = frontier_figure([NEW, OLD])
    assert re.findall(r'value="(\w+)"( checked| disabled)?', page) == [
        ("output", " disabled"), ("uncached", " disabled"), ("cached", " disabled"), ("total", " checked"),
    ]  # fmt: skip
    assert len(re.findall(r'class="curve s\d"', page)) == len(re.findall(r'class="curve s\d assumed"', page)) == 2


def test_points_are_labelled_by_configuration_and_tell_all_that_is_known() -> None:
    page = frontier_figure([FULL])
    assert ">tp&lt;8&gt;</text>" in page and ">c 4</text>" in page
    assert tip_of(FULL, FULL.points[0]).splitlines() == [
        "full: tp<8>, c = 4",
        "100 tokens/s/user (p90)",
        "1,110 tokens/s per GPU in all",
        "10.0 output, 100 uncached, 1,000 cached input",
        "TTFT p50 50.0 ms, p90 250 ms",
        "hit rate 90.0%",
        "8 GPUs or ranks",
    ]
    assert tip_of(FULL, FULL.points[1]).endswith("not calibrated\nINVALID RUN: on no frontier")


def test_an_invalid_point_is_hollow_and_off_the_line() -> None:
    page = frontier_figure([FULL])
    [*outputs] = re.findall(r'class="dot s(\d)( hollow)?"', page)
    assert outputs[:2] == [("0", ""), ("1", " hollow")] and "● tp&lt;8&gt;" in page and "■ dep2" in page
    assert not re.search(r'class="curve s\d"', page), "one point alone: only the flat stretch to its left"
    assert len(re.findall(r'class="curve s5 assumed"', page)) == 4, "grey: the line belongs to both configurations"


def test_charts_of_what_no_point_has_are_left_out() -> None:
    assert waiting_figure([NEW]) == hit_figure([NEW]) == curves_section([Curve("none", ())]) == ""
    assert "p90 filled, p50 hollow" in waiting_figure([FULL]) and "no data" not in hit_figure([FULL])


def test_the_table_has_every_point_with_its_three_throughputs_and_its_trust() -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", points_table([FULL]))[1:]
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in rows]
    assert cells[0][:8] == ["full", "tp&lt;8&gt;", "4", "100", "10.0", "100", "1,000", "1,110"]
    assert cells[0][-2:] == ["yes", "measured"] and cells[1][-2:] == ["NO", "not calibrated"]


def test_multiples_stand_with_their_bounds_and_verdict() -> None:
    result = compare_curves(NEW, OLD, at=[387])
    page = multiples_section(result, {})
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    [cliff] = [row for row in rows if row and row[0] == "387"]
    assert cliff[1:6] == ["1,700,000", "29,000", "58.6", "21.4", "∞"] and cliff[-1] == "no number: bounds too far apart"
    [peak] = [row for row in rows if row and row[0] == "peak"]
    assert peak[3] == "2.71"
    held = [row[-1] for row in rows if row and row[0] == "300"]
    assert held == ["holds"]
    same = multiples_section(compare_curves(OLD, msgspec.structs.replace(OLD, name="same")), {})
    assert "either may lead" in same and ">holds<" not in same
    assert "67.5% against 3.1%" in page and "<h3>Cost</h3>" not in page


def test_costs_say_that_they_do_not_add_up() -> None:
    cost = Cost(387, 0.5, 10, None, 0.01, 0.4)
    page = multiples_section(msgspec.structs.replace(compare_curves(NEW, OLD)), {"new": [cost], "old": []})
    assert "they do not add up" in page
    assert '<td class="words">new</td><td>387</td><td>0.5</td><td>10</td><td>–</td><td>0.01</td><td>0.4</td>' in page


def test_a_curve_of_one_unnamed_configuration_has_one_colour_and_its_own_name() -> None:
    sweep = Curve("sweep", tuple(OperatingPoint("", c, 100 / c, 10.0 * c) for c in (1, 2, 4, 8)))
    page = frontier_figure([sweep])
    assert page.count(">sweep</text>") == 1, "in the one panel that has figures"
    assert not re.search(r'class="dot s[1-9]', page) and ">c 8</text>" in page
    assert tip_of(sweep, sweep.points[0]).startswith("sweep, c = 1\n")


def test_a_simulated_curve_is_never_compared_without_its_models_error() -> None:
    guess = Curve("guess", tuple(msgspec.structs.replace(point, trust="step-time error 7%") for point in OLD.points))
    page = multiples_section(compare_curves(NEW, guess), {})
    assert '<p class="warn">guess is simulated: step-time error 7%</p>' in page and "new is simulated" not in page


def test_bands_and_whiskers_are_drawn_where_a_curve_has_them_and_full_racks_claim_no_ttft() -> None:
    points = tuple(
        OperatingPoint(
            "", c, 1_000 / c, 100.0 * c, ttft_p50_ms=10, ttft_p90_ms=20, utilisation=0.1 * c, saturation=label,
            seeds=Band((900 / c, 1_100 / c), (90.0 * c, 110.0 * c)),
            coefficients=Band((800 / c, 1_200 / c), (80.0 * c, 120.0 * c)),
        )
        for c, label in ((1, "STABLE"), (5, "STABLE"), (10, "SATURATED"))
    )  # fmt: skip
    curve = Curve("mine", points)
    page = frontier_figure([curve])
    assert page.count('class="band s0"') == 1 and page.count('class="whisker s0"') == 6
    assert "Whiskers: 90% of draws" in page and "off by up to 20 %" in page
    waits = waiting_figure([curve])
    assert waits.count("<circle") == 4 and "not claimed at 1 points of full racks" in waits
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", points_table([curve]))[1:]]
    assert (
        rows[0][8:10] == ["10.0", "20.0"] and rows[2][8:10] == ["not claimed"] * 2 and rows[2][-4:-2] == ["100.0%", "SATURATED"]
    )
    assert "TTFT not claimed\nprefill busy 100%, SATURATED" in tip_of(curve, points[2])
    assert 'class="band' not in frontier_figure([OLD])
