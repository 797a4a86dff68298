from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.ids import Rank
from rackserve.base.units import NS_PER_S
from rackserve.bench.session import Session
from rackserve.bench.synth import Recipe, Spread, synthesize
from rackserve.route.cost import Candidate
from rackserve.validation.cache_policies import (
    ARRANGEMENTS,
    START_WINDOW,
    CacheRow,
    CacheSetup,
    HashedSession,
    Work,
    compare_caches,
)
from tests.bench.toys import request, session
from tests.validation.naive_caches import naive_row

SMALL = Recipe(
    turns=Spread(25, 0.5, 60),
    fresh_tokens=Spread(1_500, 0.3),
    resumed_tokens=Spread(8_000, 0.3),
    new_tokens=Spread(100, 1.0, 4_000),
    break_tokens=Spread(2_000, 0.5),
    compact_tokens=Spread(1_600, 0.2),
    output=Spread(60, 1.0, 2_000),
    groups=Spread(1, 0.5, 3),
    group_requests=Spread(5, 0.5, 9),
    child_shared_tokens=1_000,
)
LANES, RANKS, LANE_TOKENS = 16, 4, 6_000


def small(share: float) -> CacheSetup:
    return CacheSetup(LANES, share, RANKS, LANE_TOKENS, warm_s=300, measured_s=1_500, tokens_per_s=3_000)


@pytest.fixture(scope="module")
def drawn() -> list[Session]:
    return list(synthesize(24, seed=3, recipe=SMALL))


@pytest.fixture(scope="module")
def rows(drawn: list[Session]) -> dict[float, CacheRow]:
    return {share: compare_caches(drawn, small(share)) for share in (0.25, 0.5, 1.0, 2.0)}


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0, 2.0])
def test_every_cell_is_that_of_naive_caches_over_a_naive_replay(
    drawn: list[Session], rows: dict[float, CacheRow], share: float
) -> None:
    setup, row = small(share), rows[share]
    naive = naive_row(
        drawn, list(ARRANGEMENTS), lanes=LANES, ranks=RANKS, room=setup.rank_blocks, block=setup.block_tokens,
        warm_s=setup.warm_s, measured_s=setup.measured_s, tokens_per_s=setup.tokens_per_s, window=START_WINDOW,
        seed=setup.seed,
    )  # fmt: skip
    assert row.num_requests > 300
    for cell in row.cells:
        hit_rate, imbalance = naive[cell.arrangement]
        assert cell.hit_rate == pytest.approx(hit_rate, abs=0.005), cell
        assert cell.imbalance == pytest.approx(imbalance, rel=0.05), cell


def hits(row: CacheRow) -> dict[str, float]:
    return {cell.arrangement: cell.hit_rate for cell in row.cells}


def test_a_pool_hits_most_until_everything_fits_anyway(rows: dict[float, CacheRow]) -> None:
    for share in (0.25, 0.5, 1.0):
        found = hits(rows[share])
        assert found["pool"] == max(found.values())
        assert found["round robin"] == min(found.values())
    gains = [hits(rows[share])["pool"] - hits(rows[share])["sticky hash"] for share in (0.5, 2.0)]
    assert gains[0] > 0.05 > abs(gains[1])


def test_the_knee_lies_where_caches_hold_all_live_sessions(rows: dict[float, CacheRow]) -> None:
    pool = {share: hits(row)["pool"] for share, row in rows.items()}
    assert pool[0.25] < pool[0.5] < pool[1.0]
    assert (pool[2.0] - pool[1.0]) / 1.0 < 0.5 * (pool[1.0] - pool[0.5]) / 0.5


def test_booked_work_is_worth_something_to_balance_alone(rows: dict[float, CacheRow]) -> None:
    cells = {cell.arrangement: cell for cell in rows[0.5].cells}
    assert cells["least uncached work"].imbalance < cells["most cached"].imbalance < cells["sticky hash"].imbalance


def test_a_rank_works_in_order_at_its_rate() -> None:
    work, rank = Work(100.0), Rank("rank", 0)
    work.add(rank, ("a", 1), 50, 0)
    work.add(rank, ("b", 1), 100, NS_PER_S // 4)
    assert work.booked(rank) == (150, 2)
    work.advance(NS_PER_S // 2)
    assert work.booked(rank) == (100, 1)
    work.advance(3 * NS_PER_S // 2 - 1)
    assert work.booked(rank) == (100, 1)
    work.advance(3 * NS_PER_S // 2)
    assert work.booked(rank) == (0, 0)


def test_a_hashed_session_stays_and_others_are_spread() -> None:
    policy = HashedSession()
    ranks = [Candidate(Rank("rank", number), 0, 0, 100, 0, 0) for number in range(4)]
    homes = {name: policy.place(name, ranks).rank for name in map(str, range(40))}
    assert homes == {name: policy.place(name, ranks).rank for name in homes}
    assert set(homes.values()) == {candidate.rank for candidate in ranks}


def test_a_session_of_growing_prompts_hits_all_but_its_end() -> None:
    """Three turns of 2, 4 and 6 blocks of 4 tokens, played again and again under new names: 0 + 2 + 4 blocks hit of 12."""
    talk = session("a", *[request(3.0 * turn, 1.0, range(2 * turn + 2)) for turn in range(3)])
    setup = CacheSetup(1, 1.0, 2, 1_000, block_tokens=4, warm_s=0, measured_s=3_000)
    row = compare_caches([talk], setup, ["pool", "sticky hash"])
    assert [cell.hit_rate for cell in row.cells] == [pytest.approx(0.5, abs=0.01)] * 2


def test_a_cache_without_a_block_and_a_run_without_a_request_are_refused(drawn: list[Session]) -> None:
    with pytest.raises(ConfigError, match="share"):
        CacheSetup(1, 0.001, 4, 100)
    with pytest.raises(ConfigError, match="no request"):
        compare_caches(drawn[:1], CacheSetup(1, 1.0, 4, 8_000, warm_s=10, measured_s=0))
