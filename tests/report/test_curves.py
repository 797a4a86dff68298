from __future__ import annotations

from itertools import pairwise
from math import exp, inf, log

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError
from rackserve.bench.frontier import Curve, OperatingPoint
from rackserve.bench.metrics import Throughput
from rackserve.report.curves import CurveComparison, Line, Match, compare_curves, cost_at
from tests.report.pair import NEW, OLD, curve


def at(result: CurveComparison, speed: float) -> Match:
    [match] = [match for match in result.matches if match.interactivity == speed]
    return match


# ---- synthetic curves whose multiples are known


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.floats(0.1, 50), st.lists(st.floats(2, 900), min_size=1, max_size=6, unique=True), st.floats(-3, -0.1))
def test_a_curve_that_is_k_times_another_is_k_times_it_everywhere(k: float, speeds: list[float], power: float) -> None:
    old = curve("old", [(x, 1e6 * x**power) for x in speeds])
    new = curve("new", [(x, k * 1e6 * x**power) for x in speeds])
    result = compare_curves(new, old, at=[min(speeds) / 2, (min(speeds) + max(speeds)) / 2])
    assert result.peak_ratio == pytest.approx(k)
    assert [match.ratio for match in result.matches] == pytest.approx([k] * len(result.matches))
    assert all(m.kept_above == pytest.approx(m.kept_below) for m in result.matches)


def test_a_power_law_is_met_between_its_points_and_its_elasticity_is_its_power() -> None:
    """T = c x^-1 over T = c x^-3: the ratio is x^2, known everywhere, and moves by 2 % for 1 % of speed."""
    new = curve("new", [(x, 1e6 / x) for x in (1, 100)])
    old = curve("old", [(x, 1e6 / x**3) for x in (1, 3, 100)])
    for speed in (2.0, 10.0, 50.0):
        match = at(compare_curves(new, old, at=[speed]), speed)
        assert match.ratio == pytest.approx(speed**2)
        assert match.elasticity == pytest.approx(2)
        assert match.low is not None and match.high is not None
        assert (match.low, match.high) == pytest.approx((speed**2 * 0.98**3 / 1.02, speed**2 * 1.02**3 / 0.98))


def test_the_published_pair_gives_both_its_multiples_and_what_each_keeps() -> None:
    result = compare_curves(NEW, OLD, at=[387])
    match = at(result, 387)
    assert result.peak_ratio == pytest.approx(2.7, abs=0.02)
    assert match.ratio == pytest.approx(58, abs=1)
    assert (match.kept_above, match.kept_below) == pytest.approx((0.67, 0.031), abs=0.005)
    assert match.ratio == pytest.approx(result.peak_ratio * (match.kept_above or 0) / (match.kept_below or 1))


def test_at_the_cliff_the_multiple_is_said_to_mean_nothing_and_before_it_it_holds() -> None:
    result = compare_curves(NEW, OLD, at=[150, 387])
    cliff, plain = at(result, 387), at(result, 150)
    assert cliff.useless and not plain.useless
    assert cliff.elasticity is not None and cliff.elasticity > 40
    assert plain.elasticity is not None and plain.elasticity < 1
    assert cliff.low is not None and cliff.low < 30 and cliff.high == inf, "2 % more speed, and the old curve has ended"


def test_the_paragraph_explains_the_multiple_that_was_asked_for_from_the_data() -> None:
    text = compare_curves(NEW, OLD, at=[387]).text
    for part in (
        "2.71 times the throughput per GPU of old (2,520,000 against 930,000",
        "at 387 tok/s/user 58.6 times",
        "67.5% against 3.1%: 2.71 x 67.5% / 3.1% = 58.6",
        "old has given up a factor of 32.1 there and new one of 1.48; their quotient, 21.6",
        "means nothing as one number",
        "The configuration there is wide (new) and narrow (old)",
    ):
        assert part in text, text
    plain = compare_curves(NEW, OLD, at=[150]).text
    assert "at 150 tok/s/user" in plain and "means nothing" not in plain


def test_within_what_is_known_of_the_speeds_either_curve_may_lead() -> None:
    near = curve("near", [(100, 0.93e6 * 1.001), (300, 0.4e6 * 1.001)])
    far = curve("far", [(100, 0.93e6 * 1.5), (300, 0.4e6 * 1.5)])
    assert at(compare_curves(near, OLD, at=[200]), 200).undecided
    assert not at(compare_curves(far, OLD, at=[200]), 200).undecided
    assert not at(compare_curves(OLD, far, at=[200]), 200).undecided
    assert not at(compare_curves(near, OLD, at=[350]), 350).undecided, "no multiple, nothing to decide"


def test_a_configuration_named_like_its_curve_is_not_named_twice() -> None:
    single = Curve("bench", (msgspec.structs.replace(OLD.points[0], label="bench"),))
    text = compare_curves(NEW, single).text
    assert "The configuration there is" in text and "(new)" in text and "(bench)" not in text


def test_without_a_speed_the_largest_multiple_is_explained() -> None:
    result = compare_curves(NEW, OLD)
    largest = max(match.ratio or 0 for match in result.matches)
    assert f"{largest:.0f} times" in result.text


def test_a_lead_that_shrinks_is_said_so() -> None:
    text = compare_curves(OLD, NEW, at=[387]).text
    assert "old gives up more of its peak than new, so its lead shrinks with speed" in text


def test_where_both_keep_as_much_the_multiple_is_the_same_and_said_so() -> None:
    text = compare_curves(NEW, OLD, at=[50]).text
    assert "at 50 tok/s/user 2.71 times. That is the same, because each keeps as much of its own peak there, 100.0%" in text
    assert "There new is at its peak and old is at its peak" in text


# ---- the rule


def test_left_of_its_slowest_point_a_curve_is_flat_and_right_of_its_fastest_it_has_no_value() -> None:
    line = Line(curve("x", [(10, 100), (20, 50)]))
    assert line.at(1) == line.at(10) == 100
    assert line.at(20) == 50 and line.at(20.001) is None
    assert line.slopes(5) == (0, 0) and line.slopes(20)[1] == -inf
    assert line.slopes(10)[0] == 0 and line.slopes(10)[1] == pytest.approx(-1)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=8), st.floats(0.5, 120))
def test_a_line_is_the_naive_interpolation_and_never_rises(points: list[tuple[float, float]], speed: float) -> None:
    line = Line(curve("x", points))
    best = [(x, y) for x, y in points if not any((a >= x and b >= y) and (a, b) != (x, y) for a, b in points)]
    best = sorted(set(best))
    naive: float | None = None
    if speed <= best[0][0]:
        naive = best[0][1]
    for (x0, y0), (x1, y1) in pairwise(best):
        if x0 < speed <= x1:
            naive = exp(log(y0) + log(y1 / y0) * log(speed / x0) / log(x1 / x0))
    assert line.at(speed) == (None if naive is None else pytest.approx(naive))
    faster = line.at(speed * 1.1)
    assert faster is None or faster <= (line.at(speed) or 0) * (1 + 1e-12)


def test_where_one_curve_has_ended_there_is_no_multiple_and_the_paragraph_says_which() -> None:
    result = compare_curves(NEW, OLD, at=[1000])
    match = at(result, 1000)
    assert match.ratio is match.low is match.elasticity is match.below is None and match.kept_above is not None
    assert "there is no multiple: old has no point that fast" in result.text


def test_a_curve_without_a_valid_point_or_without_the_parts_is_refused() -> None:
    invalid = msgspec.structs.replace(NEW.points[0], valid=False)
    with pytest.raises(ConfigError, match="x: has no valid point"):
        compare_curves(Curve("x", (invalid,)), OLD)
    with pytest.raises(ConfigError, match="new: has no valid point with a throughput of output; compare by total"):
        compare_curves(NEW, OLD, "output")


# ---- cost


def test_costs_are_the_whole_cost_over_one_kind_of_tokens_and_per_session() -> None:
    parts = Throughput(1000, 100, 10)
    point = OperatingPoint("x", 1, 50, 1110, parts=parts, num_gpus=4, requests_per_s=2, requests_per_session=40)
    cost = cost_at(Line(Curve("x", (point,))), 50, 3.6)
    second = 3.6 / 3600
    assert (cost.per_million_cached, cost.per_million_uncached, cost.per_million_output) == pytest.approx(
        (second * 1e6 / 1000, second * 1e6 / 100, second * 1e6 / 10)
    )
    assert cost.per_request == pytest.approx(second * 4 / 2), "4 GPUs for half a second"
    assert cost.per_session == pytest.approx(40 * second * 4 / 2)
    assert cost_at(Line(Curve("x", (point,))), 50, 3.6, requests_per_session=10).per_session == pytest.approx(10 * second * 2)


def test_unknown_costs_are_none_and_between_points_they_are_interpolated() -> None:
    assert not cost_at(Line(NEW), 387, 8.5).known
    ends = [
        OperatingPoint("x", 1, x, y, parts=Throughput(0, y / 2, y / 2), num_gpus=1, requests_per_s=y)
        for x, y in ((10, 64), (40, 4))
    ]
    cost = cost_at(Line(Curve("x", tuple(ends))), 20, 3600)
    assert cost.per_request == pytest.approx(1 / 16)
    assert cost.per_million_output == pytest.approx(1e6 / 8)
    assert cost.per_million_cached is None and cost.per_session is None


def test_the_paragraph_says_what_hit_and_what_was_full() -> None:
    def curve(name: str, hit: float, busy: float, label: str) -> Curve:
        points = (
            OperatingPoint("", 9, 100, 1_000, hit_rate=hit, utilisation=busy, saturation=label),
            OperatingPoint("", 1, 400, 200, hit_rate=0.95, utilisation=0.2, saturation="STABLE"),
        )
        return Curve(name, points)

    text = compare_curves(curve("a", 0.949, 0.99, "SATURATED"), curve("b", 0.7, 0.6, "STABLE"), at=[400]).text
    assert "a hits 95.0% there and has its prefill ranks 20% busy there and full at its peak" in text
    assert (
        "b hits 95.0% there and 70.0% at its peak and has its prefill ranks 20% busy there and 60% busy at its peak, so" in text
    )
    assert "so its peak is where its points end" in text
