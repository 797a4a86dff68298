from __future__ import annotations

import msgspec
import pytest

from rackserve.bench.frontier import Band
from rackserve.simulated_rack import SimulatedSetup
from rackserve.whatif.grid import Variant
from rackserve.whatif.points import curves_of, pair_of, point_of, scaled_by, statistic_of
from rackserve.whatif.runs import ResultRow, seeds_of
from tests.whatif.small import SETUP, row

ONE, TWO = Variant("pool=true", SETUP), Variant("pool=false", msgspec.structs.replace(SETUP, pool=False))


def rows() -> dict[SimulatedSetup, ResultRow]:
    found = {setup: row(setup, 1_000 + n, 10 + n) for n, setup in enumerate(seeds_of(ONE.setup, 3))}
    found |= {setup: row(setup, 800 + n, 20 + n, 2.0, 0.97) for n, setup in enumerate(seeds_of(TWO.setup, 3))}
    return found


def test_a_point_is_the_mean_of_its_seeds_and_lies_within_its_intervals() -> None:
    found = point_of(ONE, rows(), 3)
    assert found.figures["per_gpu"] == pytest.approx(1_001 * 4 / 150 / 6, rel=2e-3)
    assert found.figures["interactivity"] == pytest.approx((100 + 1_000 / 11 + 1_000 / 12) / 3)
    assert (found.num_requests, found.num_sessions, found.num_seeds) == (120, 6, 3)
    for name, interval in found.intervals.items():
        assert interval.low <= found.figures[name] <= interval.high
    point = found.point
    assert point is not None and point.parts is not None and point.seeds is not None
    assert point.per_gpu == pytest.approx(point.parts.total_with_cached_input, rel=2e-3)
    assert point.requests_per_session == 20 and point.num_gpus == 6 and point.saturation == "STABLE" and point.claims_ttft
    assert point.seeds.interactivity[0] < point.interactivity < point.seeds.interactivity[1]


def test_a_full_rack_claims_no_waiting_time() -> None:
    found = point_of(TWO, rows(), 3)
    assert found.saturation == "SATURATED" and found.point is not None and not found.point.claims_ttft


def test_pairs_are_taken_seed_by_seed() -> None:
    found = pair_of(ONE, TWO, rows(), 3, "per_gpu")
    assert found is not None and found.num_agreeing == 3
    assert found.differences == pytest.approx([200 * 4 / 150 / 6] * 3, rel=0.02)
    assert found.ratio is not None and found.ratio.estimate == pytest.approx(1.25, rel=1e-2)


def test_one_seed_without_a_result_leaves_the_point_out_and_says_why() -> None:
    broken = rows()
    broken[SETUP] = msgspec.structs.replace(row(SETUP), figures=None, error="no room")
    found = point_of(ONE, broken, 3)
    assert found.point is None and found.errors == ("no room",) and not found.figures
    assert pair_of(ONE, TWO, broken, 3, "per_gpu") is None


def test_curves_are_one_for_each_configuration() -> None:
    faster = Variant("pool=true", msgspec.structs.replace(SETUP, concurrency=7))
    made = rows() | {setup: row(setup, 500, 5) for setup in seeds_of(faster.setup, 3)}
    found = curves_of([point_of(v, made, 3, intervals=False) for v in (ONE, TWO, faster)], "mine")
    assert [(curve.name, len(curve.points)) for curve in found] == [("mine, pool=true", 2), ("mine, pool=false", 1)]
    assert {point.concurrency for point in found[0].points} == {30, 7} and all(not p.label for p in found[0].points)


def test_a_session_without_the_figure_gives_none_and_a_factor_needs_its_name() -> None:
    assert statistic_of("interactivity", SETUP)([]) is None and statistic_of("hit_rate", SETUP)([]) is None
    assert scaled_by(scaled_by(SETUP, "cache_size", 2.0), "cache_size", 0.5).cache_size == 1.0
    with pytest.raises(ValueError, match="choose one of prefill_time"):
        scaled_by(SETUP, "cache", 2.0)
    with pytest.raises(ValueError, match="the lower first"):
        Band((2.0, 1.0), (1.0, 2.0))
