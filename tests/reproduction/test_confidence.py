from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from rackserve.reproduction.confidence import intervals, loads, mean_figures
from rackserve.reproduction.setups import three_pairs
from rackserve.simulated_rack import SimulatedFigures, prefill_rate
from rackserve.whatif.runs import ResultRow, SessionSample, Workload
from tests.reproduction.runs import RUN, run

POOL = three_pairs()["three-pool"]


def row(waits: Sequence[float], figures: SimulatedFigures = RUN, waiting: Sequence[float] = ()) -> ResultRow:
    """A run whose sessions had one request each, with these waits."""
    sessions = {f"s{number}": SessionSample(1, 96, 4, 10, (wait,), (2.0,)) for number, wait in enumerate(waits)}
    return ResultRow(POOL, Workload(1), "0", figures, tuple(waiting), sessions)


def test_a_figure_is_the_mean_of_its_seeds_and_its_interval_holds_them() -> None:
    rows = {"three-pool": [row([1.0] * 9), row([3.0] * 9)]}
    ttft = intervals(rows)["pool-ttft"]
    assert (ttft.estimate, ttft.low, ttft.high) == (2.0, 1.0, 3.0)
    assert intervals(rows)["pool-hit"].estimate == pytest.approx(96)
    assert "pinned-ttft" not in intervals(rows)


def test_the_interval_of_a_wait_reaches_to_what_other_step_times_give_and_that_of_hits_does_not() -> None:
    rows = {"three-pool": [row([2.0] * 9)], "three-pool-fast": [row([1.5] * 9)], "three-pool-slow": [row([4.0] * 9)]}
    ttft, hits = intervals(rows)["pool-ttft"], intervals(rows)["pool-hit"]
    assert (ttft.low, ttft.estimate, ttft.high) == (1.5, 2.0, 4.0)
    assert hits.low == hits.high == pytest.approx(96)


def test_pool_and_pinned_are_compared_seed_by_seed() -> None:
    pinned = [row([1.0] * 10), row([1.0] * 20)]
    pool = [row([1.0] * 20), row([1.0] * 30)]
    ratio = intervals({"three-pinned": pinned, "three-pool": pool})["pool-requests"]
    assert ratio.estimate == pytest.approx((2 + 1.5) / 2)
    assert ratio.low < ratio.estimate < ratio.high


def test_load_is_uncached_work_over_what_full_steps_compute() -> None:
    capacity = 6 * prefill_rate(POOL)
    full = run(requests_per_s=capacity / 6e3, uncached_per_request=6e3)
    half = run(requests_per_s=capacity / 12e3, uncached_per_request=6e3)
    found = loads(
        {"a": [row([1.0], full, [1, 1, 1])], "b": [row([1.0], half, [1, 9, 99])], "c": [row([1.0], full, [1, 9, 99])]}
    )
    assert {name: load.label for name, load in found.items()} == {"a": "SATURATED", "b": "STABLE", "c": "OVERLOADED"}
    assert found["a"].share == pytest.approx(1) and found["b"].share == pytest.approx(0.5)


def test_figures_of_seeds_are_averaged_counts_are_added_and_what_one_lacks_is_none() -> None:
    first, second = run(requests_per_s=10.0, ttft_p50_s=1.0), run(requests_per_s=20.0, ttft_p50_s=None)
    found = mean_figures({"a": [row([], first), row([], second)]})["a"]
    assert (found.requests_per_s, found.num_requests, found.ttft_p50_s) == (15.0, 2_000, None)
    assert mean_figures({"a": [row([], RUN)]})["a"] == msgspec.structs.replace(RUN)
