"""The prefix index against a naive per-block model, under loss, duplicates, snapshots and restarts."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Rank
from rackserve.base.keys import Chain, extend_chain, prefix
from rackserve.base.messages import BlocksRemoved, BlocksStored, PresenceSnapshot
from rackserve.route.index import PrefixIndex

HOLDERS = (Rank("prefill0"), Rank("prefill0", 1), Rank("prefill1"), Rank("pool"))
A, B = HOLDERS[:2]
Path = tuple[int, ...]


def chain_of(path: Path) -> Chain:
    return extend_chain(b"", b"r" * 16, array("i", path).tobytes(), 1)


def prefixes(path: Path) -> set[Path]:
    return {path[:n] for n in range(1, len(path) + 1)}


class NaiveHolder:
    """A cache as a set of prefix-closed paths, and what a listener knows of it from numbered events."""

    def __init__(self) -> None:
        self.blocks: set[Path] = set()
        self.number = 0
        self.heard = 0
        self.known: set[Path] | None = set()  # None: stale

    def maximal(self) -> tuple[Chain, ...]:
        return tuple(chain_of(p) for p in sorted(self.blocks) if not any(q[:-1] == p for q in self.blocks))

    def hear(self, number: int, is_snapshot: bool = False) -> bool:
        if is_snapshot:
            if number >= self.heard:
                self.heard, self.known = number, set(self.blocks)
        elif number == 1 or (self.known is not None and number == self.heard + 1):
            self.heard, self.known = number, set(self.blocks)
        elif self.known is None or number > self.heard + 1:
            self.heard, self.known = max(self.heard, number), None
        return self.known is not None


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
ACTIONS = st.tuples(
    st.sampled_from(["store", "store", "store", "remove", "remove", "lose", "repeat", "snapshot", "restart", "drop"]),
    st.integers(0, len(HOLDERS) - 1),
    PATHS,
    st.integers(0, 7),
)


def next_event(naive: NaiveHolder, rank: Rank, path: Path, at: int, remove: bool) -> BlocksStored | BlocksRemoved:
    """Change the naive cache, as the holder would, and return the event that announces it."""
    naive.number += 1
    if remove:
        keep = min(at, len(path))
        doomed = path[: keep + 1]
        naive.blocks -= {p for p in naive.blocks if p[: len(doomed)] == doomed and len(p) > keep}
        return BlocksRemoved(rank, naive.number, chain_of(path), keep)
    start = len(prefixes(path) & naive.blocks)
    naive.blocks |= prefixes(path)
    return BlocksStored(rank, naive.number, chain_of(path), start)


def step(
    index: PrefixIndex, naives: list[NaiveHolder], action: tuple[str, int, Path, int], sent: dict[Rank, BlocksStored]
) -> None:
    kind, who, path, at = action
    rank, naive = HOLDERS[who], naives[who]
    if kind in ("store", "remove", "lose"):
        event = next_event(naive, rank, path, at, kind == "remove" or (kind == "lose" and at % 2 == 1))
        if kind != "lose":
            assert index.apply(event) == naive.hear(event.number)
            if isinstance(event, BlocksStored):
                sent[rank] = event
    elif kind == "repeat" and rank in sent and sent[rank].number > 1:
        known = naive.known
        assert index.apply(sent[rank]) == (known is not None)
    elif kind == "snapshot":
        snapshot = PresenceSnapshot(rank, naive.number, naive.maximal())
        assert index.apply(snapshot) == naive.hear(naive.number, is_snapshot=True)
    elif kind == "restart":  # unannounced: the numbers alone tell
        naive.blocks, naive.number = set(), 0
        event = next_event(naive, rank, path, at, remove=False)
        assert index.apply(event) == naive.hear(1)
        sent.pop(rank, None)
    elif kind == "drop":
        index.drop(rank)
        naives[who] = NaiveHolder()
        sent.pop(rank, None)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(ACTIONS, min_size=15, max_size=40), st.lists(PATHS, min_size=1, max_size=3))
def test_the_index_claims_exactly_what_the_events_heard_warrant(
    actions: list[tuple[str, int, Path, int]], probes: list[Path]
) -> None:
    index = PrefixIndex(max_runs=1000)
    naives = [NaiveHolder() for _ in HOLDERS]
    sent: dict[Rank, BlocksStored] = {}
    for action in actions:
        step(index, naives, action, sent)
        index.check()
        for rank, naive in zip(HOLDERS, naives, strict=True):
            known = naive.known or set()
            maximal = sorted(chain_of(p) for p in known if not any(q[:-1] == p for q in known))
            assert sorted(index.holding(rank)) == maximal
            assert (index.heard(rank) == -1) == (naive.known is None)
        for path in probes:
            expected = {r: len(prefixes(path) & (n.known or set())) for r, n in zip(HOLDERS, naives, strict=True)}
            assert index.match(chain_of(path)) == {rank: blocks for rank, blocks in expected.items() if blocks}


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.integers(1, 6), PATHS)
def test_a_bounded_index_only_forgets(actions: list[tuple[str, int, Path, int]], max_runs: int, probe: Path) -> None:
    small, large = PrefixIndex(max_runs=max_runs), PrefixIndex(max_runs=1000)
    for index in (small, large):
        naives = [NaiveHolder() for _ in HOLDERS]
        sent: dict[Rank, BlocksStored] = {}
        for action in actions:
            step(index, naives, action, sent)
            index.check()
    truth = large.match(chain_of(probe))
    assert all(blocks <= truth.get(rank, 0) for rank, blocks in small.match(chain_of(probe)).items())


def stored(holder: Rank, number: int, path: Path) -> BlocksStored:
    return BlocksStored(holder, number, chain_of(path), 0)


def test_a_gap_is_seen_and_mended_by_a_snapshot() -> None:
    index = PrefixIndex(max_runs=100)
    for number in (1, 2, 3, 4):
        assert index.apply(stored(A, number, (1,) * number))
    assert not index.apply(stored(A, 6, (1,) * 6))
    assert index.heard(A) == -1 and index.match(chain_of((1,) * 6)) == {}
    assert not index.apply(stored(A, 7, (1,) * 7))  # asked for again: the first question may have been lost
    assert not index.apply(stored(A, 2, (1,) * 2))
    assert not index.apply(PresenceSnapshot(A, 5, (chain_of((1,) * 5),)))  # too old to mend it
    assert index.apply(PresenceSnapshot(A, 7, (chain_of((1,) * 7),)))
    assert index.match(chain_of((1,) * 9)) == {A: 7}
    assert index.apply(stored(A, 8, (1,) * 8))


def test_a_snapshot_replaces_what_was_known_even_before_the_gap_shows() -> None:
    index = PrefixIndex(max_runs=100)
    index.apply(stored(A, 1, (1, 2, 3)))
    assert index.apply(PresenceSnapshot(A, 2, (chain_of((1, 2)),)))  # event 2, a removal, was lost
    assert index.match(chain_of((1, 2, 3))) == {A: 2}


def test_a_router_that_starts_late_asks_for_a_snapshot() -> None:
    index = PrefixIndex(max_runs=100)
    assert not index.apply(stored(A, 3, (1, 2, 3)))
    assert index.holders() == [A] and index.heard(A) == -1


def test_a_restarted_holder_is_known_by_its_numbers() -> None:
    index = PrefixIndex(max_runs=100)
    for number in (1, 2, 3):
        index.apply(stored(A, number, (1, 2, 3)))
    assert index.apply(stored(A, 1, (7,)))
    assert index.match(chain_of((1, 2, 3))) == {} and index.match(chain_of((7,))) == {A: 1}


def test_events_of_a_dropped_life_do_not_come_back() -> None:
    index = PrefixIndex(max_runs=100)
    index.apply(stored(A, 1, (1, 2, 3)))
    index.drop(A)
    assert not index.apply(stored(A, 2, (1, 2, 3, 4)))
    assert index.match(chain_of((1, 2, 3, 4))) == {}


def test_a_growing_session_stays_one_run_and_a_split_keeps_both_holders_right() -> None:
    index = PrefixIndex(max_runs=100)
    path = tuple(range(50))
    for turn in range(1, 11):
        index.apply(stored(A, turn, path[: turn * 5]))
    assert index.num_runs == 1
    index.apply(stored(B, 1, path[:23]))
    assert index.num_runs == 1
    index.apply(stored(B, 2, (*path[:17], 99)))
    assert index.match(chain_of(path)) == {A: 50, B: 23}
    assert index.match(chain_of((*path[:17], 99, 98))) == {A: 17, B: 18}


def test_what_was_matched_lately_outlives_what_was_not() -> None:
    index = PrefixIndex(max_runs=3)
    for number, path in enumerate([(1, 1), (2, 2), (3, 3)], 1):
        index.apply(stored(A, number, path))
    index.match(chain_of((1, 1)))
    index.apply(stored(A, 4, (4, 4)))
    assert index.match(chain_of((1, 1))) == {A: 2}
    assert index.match(chain_of((2, 2))) == {}


def test_a_forgotten_prefix_comes_back_with_the_next_event_of_its_session() -> None:
    index = PrefixIndex(max_runs=1)
    index.apply(stored(A, 1, (1, 1)))
    index.apply(stored(A, 2, (2, 2)))
    assert index.match(chain_of((1, 1))) == {}
    index.apply(BlocksStored(A, 3, chain_of((1, 1, 1)), 2))
    assert index.match(chain_of((1, 1, 1))) == {A: 3}
    index.apply(BlocksRemoved(A, 4, chain_of((2, 2)), 0))  # of blocks forgotten long ago
    index.check()


def test_leavers_leave_nothing_and_the_limit_holds_over_all_holders() -> None:
    index = PrefixIndex(max_runs=200)
    for wave in range(3):
        ranks = [Rank(f"wave{wave}", n) for n in range(5)]
        for rank in ranks:
            for number in range(1, 101):
                index.apply(stored(rank, number, (rank.dp_rank, wave, number)))
                assert index.num_runs <= 200
        for rank in ranks:
            index.drop(rank)
            assert index.holding(rank) == [] and rank not in index.holders()
        index.check()
    assert index.num_runs == 0 and index.holders() == []


def test_an_overclaim_would_be_caught() -> None:
    index = PrefixIndex(max_runs=10)
    index.apply(stored(A, 1, (1, 1)))
    index.apply(stored(B, 1, (1, 1, 1, 1, 1)))
    assert index.match(chain_of((1, 1, 1, 1, 1))) == {A: 2, B: 5}
    (run,) = index._tree.walk()
    run.payload[B] = 2
    with pytest.raises(InvariantError, match="beyond what its holders have"):
        index.check()


def test_a_shorter_question_gets_a_shorter_answer() -> None:
    index = PrefixIndex(max_runs=10)
    index.apply(stored(A, 1, (1, 2, 3, 4)))
    assert index.match(prefix(chain_of((1, 2, 3, 4)), 2)) == {A: 2}
    assert index.match(b"") == {}
