"""Index, promises, load and policy together, driven by a toy router, on faults that users of other routers reported."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from rackserve.base.ids import POOL_RANK, Attempt, Rank
from rackserve.base.keys import Chain, count, extend_chain
from rackserve.base.messages import BlocksStored
from rackserve.route.cost import Candidate, uncached_work
from rackserve.route.index import PrefixIndex
from rackserve.route.load import LoadBook
from rackserve.route.placement import POLICIES
from rackserve.route.promises import Promises


def ranks(number: int) -> list[Rank]:
    return [Rank(f"prefill{n}") for n in range(number)]


def chain_of(*path: int) -> Chain:
    return extend_chain(b"", b"r" * 16, array("i", path).tobytes(), 1)


class ToyRouter:
    """One token per block. `finish` does the work of an attempt and announces its blocks."""

    def __init__(self, up: Sequence[Rank], policy: str = "least_uncached_work", fetch_cost: float = 0.02) -> None:
        self.up = list(up)
        self.policy, self.fetch_cost = POLICIES[policy](), fetch_cost
        self.index, self.promises, self.load = PrefixIndex(max_runs=10_000), Promises(), LoadBook()
        self.running: dict[Attempt, tuple[Rank, Chain]] = {}
        self.numbers: dict[Rank, int] = {}

    def weigh(self, chain: Chain, tokens: int) -> list[Candidate]:
        held, coming = self.index.match(chain), self.promises.match(chain)
        return [
            Candidate(
                rank,
                *uncached_work(tokens, max(held.get(rank, 0), coming.get(rank, 0)), held.get(POOL_RANK, 0), self.fetch_cost),
                *self.load.booked(rank),
            )
            for rank in sorted(self.up)
        ]

    def place(self, request: str, chain: Chain, tokens: int = 0, session: str = "") -> Candidate:
        tokens = tokens or count(chain)
        chosen = self.policy.place(session, self.weigh(chain, tokens))
        self.load.book(chosen.rank, (request, 1), chosen.own_tokens)
        self.promises.add(chosen.rank, (request, 1), chain)
        self.running[request, 1] = (chosen.rank, chain)
        return chosen

    def finish(self, request: str) -> None:
        rank, chain = self.running.pop((request, 1))
        assert self.load.release(rank, (request, 1))
        assert self.promises.remove(rank, (request, 1))
        self.store(rank, chain)

    def work(self, tokens: int) -> list[str]:
        """Let each rank do `tokens` of work in order of arrival; the requests that ended."""
        ended = []
        for rank in self.up:
            left = tokens
            for attempt in self.load.attempts(rank):
                before = self.load.outstanding(rank)
                self.load.progress(rank, attempt, left)
                left -= before - self.load.outstanding(rank)
                if left:
                    self.finish(attempt[0])
                    ended.append(attempt[0])
        return ended

    def store(self, holder: Rank, chain: Chain) -> None:
        self.numbers[holder] = self.numbers.get(holder, 0) + 1
        assert self.index.apply(BlocksStored(holder, self.numbers[holder], chain, 0))

    def lose(self, rank: Rank) -> list[Attempt]:
        self.up.remove(rank)
        self.index.drop(rank)
        self.numbers.pop(rank, None)
        lost = self.load.attempts(rank)
        for attempt in lost:
            self.promises.remove(rank, attempt)
            self.load.release(rank, attempt)
        return lost

    def outstanding(self) -> list[int]:
        return [self.load.outstanding(rank) for rank in sorted(self.up)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_counts_as_load_and_all_of_it_is_released(policy: str) -> None:
    router = ToyRouter(ranks(3), policy)
    shared = tuple(range(50))
    for number in range(30):
        router.place(f"r{number}", chain_of(*shared, 100 + number), session=f"s{number}")
    in_flight = [sum(rank == where for where, _ in router.running.values()) for rank in ranks(3)]
    assert [router.load.booked(rank)[1] for rank in ranks(3)] == in_flight and sum(in_flight) == 30
    for number in range(30):
        router.finish(f"r{number}")
    assert router.load.is_idle() and router.promises.is_empty() and router.outstanding() == [0, 0, 0]


def test_on_a_miss_the_idle_rank_is_taken_whatever_its_record() -> None:
    empty, recorded = ranks(2)
    router = ToyRouter([empty, recorded])
    for number in range(50):
        router.store(recorded, chain_of(1000 + number, 1, 2, 3))
    for number in range(10):
        router.load.book(empty, (f"long{number}", 1), 100)
    for number in range(9):
        assert router.place(f"r{number}", chain_of(number), tokens=100).rank == recorded
    assert router.load.outstanding(recorded) == 900  # still less than the other's 1,000, so the next one too
    assert router.place("r9", chain_of(9), tokens=100).rank == recorded
    assert {router.place(f"r{number}", chain_of(number), tokens=100).rank for number in (10, 11)} == {empty, recorded}


@pytest.mark.parametrize("unit", [10, 200, 1000])
def test_long_prompts_go_to_the_warm_rank_and_short_ones_to_the_idle_one_with_the_switch_where_the_formula_says(
    unit: int,
) -> None:
    busy, warm, idle = ranks(3)
    switched = []
    for length in range(10, 10_001, 10):
        candidates = [
            Candidate(r, *uncached_work(length, c, 0, 0.02), q * unit, q)
            for r, c, q in ((busy, 0, 10), (warm, length * 8 // 10, 9), (idle, 0, 2))
        ]
        chosen = POLICIES["least_uncached_work"]().place("", candidates).rank
        assert chosen == (warm if 9 * unit + length * 2 // 10 < 2 * unit + length else idle)
        switched.append(chosen == warm)
    assert switched == sorted(switched)  # it switches once
    assert sum(switched) == sum(length * 8 > 70 * unit for length in range(10, 10_001, 10))


def test_a_dead_rank_is_never_chosen_again_and_comes_back_with_an_empty_record() -> None:
    router = ToyRouter(ranks(3))
    hot = tuple(range(100))
    best = router.place("first", chain_of(*hot)).rank
    router.finish("first")
    assert router.place("second", chain_of(*hot, 1)).rank == best
    assert router.lose(best) == [("second", 1)]
    router.running.clear()
    chosen = [router.place(f"r{number}", chain_of(*hot, number)).rank for number in range(20)]
    assert best not in chosen and best not in router.index.holders()
    router.up.append(best)
    assert router.index.holding(best) == [] and router.promises.match(chain_of(*hot)).get(best) is None
    assert next(c for c in router.weigh(chain_of(*hot), 100) if c.rank == best).local_tokens == 0


def test_each_data_parallel_rank_has_its_own_record() -> None:
    every = [Rank(f"worker{w}", r) for w, n in enumerate((1, 2, 4)) for r in range(n)]
    router = ToyRouter(every)
    homes = {}
    for session in range(40):
        homes[session] = router.place(f"a{session}", chain_of(session, 1, 2, 3)).rank
    for session in range(40):
        router.finish(f"a{session}")
    assert set(homes.values()) == set(every)
    for session in range(40):
        assert router.place(f"b{session}", chain_of(session, 1, 2, 3, 4)).rank == homes[session]
        router.finish(f"b{session}")


def burst(router: ToyRouter, number: int, prefix_blocks: int, tail: int) -> dict[Rank, int]:
    """Place siblings at once; how often each rank must compute the shared prefix."""
    computed: dict[Rank, int] = {}
    for sibling in range(number):
        chosen = router.place(
            f"r{sibling}", chain_of(*range(prefix_blocks), *range(1000 * (sibling + 1), 1000 * (sibling + 1) + tail))
        )
        if chosen.local_tokens + chosen.pool_tokens < prefix_blocks:
            computed[chosen.rank] = computed.get(chosen.rank, 0) + 1
    return computed


def test_a_burst_of_siblings_spreads_and_no_rank_computes_the_shared_prefix_twice() -> None:
    router = ToyRouter(ranks(4))
    computed = burst(router, 64, prefix_blocks=100, tail=25)
    assert max(computed.values()) == 1
    assert max(router.outstanding()) <= 2 * sum(router.outstanding()) / 4


def test_with_the_pool_the_shared_prefix_is_not_computed_again() -> None:
    router = ToyRouter(ranks(4))
    router.place("parent", chain_of(*range(100)))
    router.finish("parent")
    router.store(POOL_RANK, chain_of(*range(100)))
    assert burst(router, 16, prefix_blocks=100, tail=5) == {}
    assert max(router.outstanding()) <= 2 * sum(router.outstanding()) / 4
    assert [router.load.booked(rank)[1] for rank in ranks(4)] != [16, 0, 0, 0]
    for sibling in range(16):
        router.finish(f"r{sibling}")
    chosen = {
        router.place(f"s{session}", chain_of(*range(100), *range(5000 + session, 5020 + session))).rank for session in range(8)
    }
    assert chosen == set(ranks(4))


@pytest.mark.parametrize("with_pool", [False, True])
def test_a_rank_added_under_load_gets_its_share_and_is_not_swamped(with_pool: bool) -> None:
    def chain_for(request: str) -> Chain:  # 30 sessions growing by 20 blocks a turn
        turn = int(request[1:])
        return chain_of(turn % 30, *range(20 * (1 + turn // 30)))

    router = ToyRouter(ranks(2))
    new = Rank("prefill2")
    chosen: list[Rank] = []
    shares: list[float] = []  # of outstanding work, after each choice since it came
    for turn in range(300):
        if turn == 100:
            assert min(router.outstanding()) > 200  # both are busy
            router.up.append(new)
        for request in router.work(tokens=6):
            if with_pool:
                router.store(POOL_RANK, chain_for(request))
        chosen.append(router.place(f"r{turn}", chain_for(f"r{turn}")).rank)
        if turn >= 100:
            mean = sum(router.outstanding()) / 3
            assert router.load.outstanding(new) <= mean + count(chain_for(f"r{turn}"))
            shares.append(router.load.outstanding(new) / mean)
    assert new in chosen[100:110]
    assert all(0.7 < share < 1.2 for share in shares[60:])
