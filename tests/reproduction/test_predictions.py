from __future__ import annotations

from math import sqrt

import pytest

from rackserve.bench.statistics import Interval
from rackserve.reproduction.confidence import Load
from rackserve.reproduction.predictions import predict, throughput_at
from tests.reproduction.runs import RUNS, run

CURVE = [(100.0, 8.0), (200.0, 4.0), (400.0, 1.0)]


@pytest.mark.parametrize(
    ("speed", "throughput"), [(50, 8), (100, 8), (100 * sqrt(2), sqrt(32)), (200, 4), (200 * sqrt(2), 2), (400, 1), (401, None)]
)
def test_between_points_the_curve_is_straight_in_both_logarithms(speed: float, throughput: float | None) -> None:
    found = throughput_at(CURVE, speed)
    assert found == (None if throughput is None else pytest.approx(throughput))


def test_a_point_that_another_beats_in_both_is_on_no_curve() -> None:
    assert throughput_at([(90.0, 3.0), *CURVE], 80) == 8
    assert throughput_at([], 80) is None


def test_ratios_are_those_of_the_points() -> None:
    found = predict(RUNS)
    assert found["peak-ratio"].value == pytest.approx(2)
    assert found["pool-requests"].value == pytest.approx(2)
    rubin, gb300, ratio = (found[name] for name in ("rubin-387", "gb300-387", "ratio-387"))
    assert rubin.value is not None and gb300.value is not None
    assert ratio.value == pytest.approx(rubin.value / gb300.value)
    assert found["rubin-kept"].value == pytest.approx(100 * rubin.value / 2e6)


def test_a_steep_curve_has_a_wide_band_and_a_large_elasticity() -> None:
    found = predict(RUNS)
    rubin, gb300 = found["rubin-387"], found["gb300-387"]
    for part in (rubin, gb300):
        assert part.elasticity is not None and part.elasticity < 0
    assert gb300.elasticity is not None and rubin.elasticity is not None and gb300.elasticity < 2 * rubin.elasticity
    assert rubin.low is not None and rubin.value is not None and rubin.high is not None
    assert rubin.low < rubin.value < rubin.high


def test_beyond_the_fastest_point_there_is_no_figure_but_a_reason() -> None:
    found = predict(RUNS | {"gb300-recipe-1": run(interactivity_p90=380.0, total_per_gpu=1e4)})
    gb300, ratio = found["gb300-387"], found["ratio-387"]
    assert gb300.value is None and "no point of the curve is that fast, the fastest being at 380" in gb300.note
    assert ratio.value is None and "no point" in ratio.note
    assert gb300.low == 0 and gb300.high is not None and 1e4 < gb300.high < 2e4, "5 % faster it would be there"
    assert gb300.elasticity is not None and gb300.elasticity < -5
    assert ratio.high is None and ratio.low is not None and ratio.low > 30
    slow = predict(RUNS | {"gb300-recipe-1": run(interactivity_p90=300.0)})["gb300-387"]
    assert (slow.value, slow.low, slow.high, slow.elasticity) == (None, None, None, None)


def test_at_the_edge_of_a_curve_a_figure_may_be_nothing_and_a_ratio_has_no_bound() -> None:
    found = predict(RUNS | {"gb300-recipe-1": run(interactivity_p90=390.0, total_per_gpu=1e4)})
    gb300, ratio = found["gb300-387"], found["ratio-387"]
    assert gb300.low == 0 and gb300.elasticity is None and "more step time" in gb300.note
    assert ratio.high is None and ratio.low is not None and ratio.value is not None and ratio.low < ratio.value


def test_what_was_not_run_is_said_to_be_not_simulated() -> None:
    found = predict({})
    assert {part.way for part in found.values() if part.value is None} == {"not simulated"}
    assert found["pool-hit"].value is None and found["rubin-387"].value is None
    assert found["single-p90"].value is not None


def test_the_cost_models_figures_are_those_of_its_page() -> None:
    found = predict({})
    assert found["single-p50"].value == pytest.approx(1844, rel=0.002)
    assert found["single-first"].value == pytest.approx(1117, rel=0.05)
    assert found["table-shard"].value == pytest.approx(10.5, rel=0.01)
    assert found["decode-step"].value == pytest.approx(-6.8, abs=0.1)


def test_a_wait_of_a_rack_without_room_is_not_claimed_but_its_rate_is() -> None:
    intervals = {"pool-ttft": Interval(4.0, 3.0, 5.0), "pool-requests": Interval(1.7, 1.5, 1.9)}
    full = {"three-pool": Load(1.0, "SATURATED"), "twelve-least": Load(0.4, "STABLE")}
    found = predict(RUNS, intervals, full)
    assert not found["pool-ttft"].claimed and "not claimed" in found["pool-ttft"].note
    assert (found["pool-ttft"].value, found["pool-ttft"].low, found["pool-ttft"].high) == (4.0, 3.0, 5.0)
    assert found["pool-requests"].claimed and found["pool-requests"].value == 1.7
    assert found["pool-hit"].claimed and found["least-ttft"].claimed
    assert "STABLE: prefill computes 40%" in found["least-ttft"].note
