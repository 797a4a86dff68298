from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.report.plots import HEIGHT, MAX_STEPS, WIDTH, Bar, Dot, Frame, cdf, log_ticks, part_bars, ticks, timeline

positive = st.floats(1e-6, 1e9)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_cover_the_range_with_few_even_round_steps(low: float, span: float) -> None:
    marks = ticks(low, low + span)
    assert marks[0] <= low + 1e-6 * abs(low)
    assert marks[-1] >= low + span - 1e-6 * (abs(low) + span)
    assert 2 <= len(marks) <= 9


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.lists(positive, min_size=1, max_size=30), st.lists(positive, max_size=30))
def test_a_cdf_stays_inside_its_frame_and_ends_at_the_top(first: list[float], second: list[float]) -> None:
    root = ET.fromstring(cdf({"a<b": first, "c": second}, {}, "t", "ms"))
    paths = [path.attrib["d"] for path in root.iter("path")]
    assert len(paths) == 1 + bool(second)
    for path in paths:
        ys = [float(y) for y in re.findall(r"V([\d.]+)", path)]
        xs = [float(x) for x in re.findall(r"H([\d.]+)", path)]
        assert ys[-1] == min(ys) == 14, "the last value lies at 100 %"
        assert xs == sorted(xs)
        assert min(xs) >= 56 - 0.1
        assert max(xs) <= WIDTH - 16 + 0.1
    assert root.attrib["viewBox"] == f"0 0 {WIDTH} {HEIGHT}"


def test_a_distribution_of_very_many_values_is_drawn_in_few_steps_that_lie_on_it() -> None:
    values = [1.0 + n for n in range(12_345)]
    root = ET.fromstring(cdf({"a": values}, {}, "t", "ms"))
    [path] = [path.attrib["d"] for path in root.iter("path")]
    steps = re.findall(r"H([\d.]+)V([\d.]+)", path)
    assert len(steps) == MAX_STEPS and steps[-1][1] == "14.0"
    exact = ET.fromstring(cdf({"a": values[:MAX_STEPS]}, {}, "t", "ms"))
    assert len(re.findall("H", next(exact.iter("path")).attrib["d"])) == MAX_STEPS


def test_parts_of_throughput_are_separate_bars_on_one_scale() -> None:
    root = ET.fromstring(part_bars([("a", (10, 20, 40)), ("b", (5, 0, 0))], ("out", "un", "ca"), "t"))
    bars = [(bar.attrib["class"], float(bar.attrib["width"])) for bar in root.iter("rect")]
    assert [name for name, _ in bars] == ["p0", "p1", "p2"] * 2
    assert [width / bars[2][1] for _, width in bars[:4]] == [0.25, 0.5, 1, 0.125]
    assert {bar.attrib["x"] for bar in root.iter("rect")} == {"190"}


def test_bars_that_overlap_in_time_do_not_overlap_on_the_page() -> None:
    bars = [Bar(0, 2, 0, "x"), Bar(1, 3, 1, "y"), Bar(2, 4, 0, "z"), Bar(1.5, 1.6, 0, "w")]
    root = ET.fromstring(timeline([("r<0>", bars), ("r1", [Bar(0, 1, 0, "v")])], "t"))
    boxes = [[float(bar.attrib[k]) for k in ("x", "y", "width", "height")] for bar in root.iter("rect")]
    for i, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, _, _ in boxes[i + 1 :]:
            assert not (y <= other_y < y + height and x - 0.2 <= other_x < x + width - 0.2)
    assert len({y for _, y, _, _ in boxes}) == 4, "three lanes in the first band, one in the second"


@settings(derandomize=True, max_examples=80, deadline=None)
@given(positive, positive)
def test_logarithmic_ticks_cover_the_range(low: float, high: float) -> None:
    low, high = sorted((low, high))
    marks = log_ticks(low, high)
    assert marks[0] <= low * 1.001 and marks[-1] >= high * 0.999 and marks == sorted(set(marks))


def test_a_logarithmic_axis_gives_equal_factors_equal_room() -> None:
    frame = Frame([0, 10], [1, 10, 100], "x", "y", log_y=True)
    assert frame.y(100) == 14 and frame.y(1) == HEIGHT - 44
    assert abs((frame.y(1) - frame.y(10)) - (frame.y(10) - frame.y(100))) < 0.11
    assert frame.y(0.001) == frame.y(1), "what lies below the axis is drawn on it"


def test_dots_lie_at_their_value_and_at_the_height_of_their_share() -> None:
    root = ET.fromstring(cdf({"a": [1, 10, 100]}, {"a": [Dot(10, 50, "p50"), Dot(1, 10, "p90")]}, "t", "x"))
    [middle, low] = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter("circle")]
    bottom, top = HEIGHT - 44, 14
    assert middle == ((62 + WIDTH - 16) / 2, (bottom + top) / 2)
    assert low[0] == 62
    assert abs(low[1] - (bottom - (bottom - top) * 0.1)) < 0.1


def test_timelines_drawn_until_one_time_share_a_scale() -> None:
    bars = [Bar(0, 10, 0, "x")]
    [short] = ET.fromstring(timeline([("r", bars)], "t", 40)).iter("rect")
    [alone] = ET.fromstring(timeline([("r", bars)], "t")).iter("rect")
    assert float(alone.attrib["width"]) == 4 * float(short.attrib["width"])


def test_drawings_without_data_say_so() -> None:
    for svg in (cdf({"a": []}, {}, "t", "ms"), part_bars([], (), "t"), timeline([("r", [])], "t")):
        assert "no data" in svg
