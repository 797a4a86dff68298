"""The directory against a naive model: what each slot's memory really holds, block by block, after every operation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError
from rackserve.base.ids import Rank
from rackserve.base.keys import count
from rackserve.base.messages import PoolGranted
from rackserve.pool.directory import Directory, PoolConfig
from rackserve.runs.cache import Removed, Stored
from tests.pool.naive_pool import CONFIG, RANKS, A, B, NaivePool, Path, R, chain_of, directory


def do(naive: NaivePool, action: tuple[str, Path, int, int, bool]) -> None:
    kind, path, which, number, flag = action
    rank = RANKS[which % 2]
    if kind == "lookup":
        naive.lookup(rank, path, number % 4)
    elif kind == "store":
        naive.store(rank, path, number % 4 if flag else 0, which < 4)
    elif kind == "release" and naive.readers:
        lease = sorted(naive.readers)[number % len(naive.readers)]
        del naive.readers[lease]
        assert naive.pool.release(lease) and not naive.pool.release(lease)
    elif kind in ("write", "commit", "cancel") and naive.writers:
        grant = sorted(naive.writers)[number % len(naive.writers)]
        if kind == "cancel":
            del naive.writers[grant]
            naive.open.discard(grant)
            assert naive.pool.cancel(grant) and not naive.pool.cancel(grant)
        else:
            (naive.write if kind == "write" else naive.commit)(grant)
    elif kind == "wait":
        naive.now += number * 10
        naive.end(None)
    elif kind == "rank_down":
        naive.end(rank)
    elif kind == "lose":
        assert naive.pool.segment_lost(number % naive.segments) == (number % naive.segments in naive.alive)
        naive.alive.discard(number % naive.segments)
    elif kind == "join" and len(naive.alive) < 3:
        naive.pool.segment_joined(naive.segments, number, number // 2 if naive.pool._cache.needs_window else 0, rank)
        naive.alive.add(naive.segments)
        naive.segments += 1


KINDS = (
    ["lookup"] * 4
    + ["store"] * 5
    + ["commit"] * 5
    + ["release", "release", "write", "cancel", "wait", "rank_down", "lose", "join"]
)
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
ACTIONS = st.tuples(st.sampled_from(KINDS), PATHS, st.integers(0, 5), st.integers(0, 6), st.booleans())


@settings(derandomize=True, max_examples=250, deadline=None)
@given(st.lists(ACTIONS, max_size=50), st.booleans())
def test_no_reader_ever_sees_anything_but_its_blocks(
    actions: list[tuple[str, Path, int, int, bool]], needs_window: bool
) -> None:
    naive = NaivePool(needs_window)
    for action in actions:
        do(naive, action)
        naive.check()
    for rank in RANKS:
        naive.end(rank)
        naive.check()
    total = naive.pool.blocks.total  # with nobody reading or writing, the whole pool can be had
    assert naive.pool.num_held == 0
    assert len(naive.pool.store(R, A, chain_of((9,) * (total + 1)), 0, False, naive.now).slots) == total


def put(pool: Directory, path: Path, now: int = 0, rank: Rank = A, with_window: bool = False) -> PoolGranted:
    granted = pool.store(R, rank, chain_of(path), 0, with_window, now)
    assert pool.commit(granted.grant)
    return granted


def found(pool: Directory, path: Path, now: int = 0) -> int:
    """How many blocks a reader is offered; gives the lease back."""
    answer = pool.lookup(R, B, chain_of(path), 0, now)
    pool.release(answer.lease)
    return len(answer.slots)


def test_blocks_are_seen_only_after_commit() -> None:
    pool = directory(8)
    granted = pool.store(R, A, chain_of((1, 2, 3)), 0, False, 0)
    assert found(pool, (1, 2, 3)) == 0 and pool.take_events() == []
    assert pool.commit(granted.grant)
    assert found(pool, (1, 2, 3)) == 3 and pool.take_events() == [Stored(chain_of((1, 2, 3)), 0)]


def test_a_writer_that_dies_leaves_nothing_half_made() -> None:
    pool = directory(4)
    first = pool.store(R, A, chain_of((1, 2, 3)), 0, False, 0)
    assert pool.store(("s", 1), B, chain_of((1, 2, 3)), 0, False, 10).grant == 0  # someone is at it
    assert pool.expire(99) == [] and pool.next_deadline() == 100
    assert pool.expire(100) == [first.grant]
    assert found(pool, (1, 2, 3)) == 0
    second = pool.store(("s", 1), B, chain_of((1, 2, 3)), 0, False, 100)
    assert len(second.slots) == 1 and not set(second.slots) & set(first.slots)  # the rest may still be written by the first
    assert pool.commit(second.grant) and found(pool, (1, 2, 3)) == 1
    pool.rank_down(A)
    assert pool.blocks.num_free == 3
    assert not pool.commit(first.grant)
    assert (pool.counters.expired_grants, pool.num_held) == (1, 0)
    pool.check()


@pytest.mark.parametrize("late", ["commit", "cancel"])
def test_a_late_writer_gives_its_slots_back_and_publishes_nothing(late: str) -> None:
    pool = directory(4)
    granted = pool.store(R, A, chain_of((1, 2, 3)), 0, False, 0)
    pool.expire(100)
    assert pool.blocks.num_free == 1
    getattr(pool, late)(granted.grant)
    assert pool.blocks.num_free == 4 and pool.take_events() == [] and found(pool, (1, 2, 3)) == 0


def test_lookups_that_nobody_follows_up_pin_nothing_for_ever() -> None:
    pool = directory(20, 20)
    paths = [(n, 1, 2, 3) for n in range(10)]
    for path in paths:
        put(pool, path)
    probe = [found(pool, path) for path in paths]
    for number in range(1000):
        now, rank = number, RANKS[number % 2]
        pool.expire(now)
        answer = pool.lookup((f"r{number}", 1), rank, chain_of(paths[number % 10]), 0, now)
        assert len(answer.slots) == 4
        if number % 3 == 0:
            assert pool.release(answer.lease)  # fetched
        elif number % 3 == 1:
            assert pool.release(answer.lease)  # not needed: the local cache was longer
        # else the request was aborted and its release got lost
    assert 0 < pool.num_held <= 34
    pool.expire(2000)
    assert pool.num_held == 0 and pool.counters.expired_leases == 333
    assert [found(pool, path) for path in paths] == probe
    assert len(pool.store(R, A, chain_of((99,) * 40), 0, False, 2000).slots) == 40
    pool.check()


def test_leased_blocks_are_not_evicted_and_what_was_promised_can_be_read() -> None:
    pool = directory(8)
    put(pool, (1, 2, 3, 4))
    lease = pool.lookup(R, B, chain_of((1, 2, 3)), 0, 0)
    granted = pool.store(R, A, chain_of((5,) * 8), 0, False, 0)
    assert len(granted.slots) == 5 and not set(granted.slots) & set(lease.slots)  # 4 free and block 4
    assert pool.counters.refused_full == 3 and pool.counters.evicted == 1
    assert pool.take_events()[-1] == Removed(chain_of((1, 2, 3, 4)), 3)
    assert pool.release(lease.lease) and not pool.release(lease.lease)


def test_a_full_pool_grants_nothing_and_says_so_at_once() -> None:
    pool = directory(3)
    put(pool, (1, 2, 3))
    lease = pool.lookup(R, B, chain_of((1, 2, 3)), 0, 0)
    assert pool.store(R, A, chain_of((4, 5)), 0, False, 0).grant == 0
    assert pool.store(R, A, chain_of((1, 2, 3, 4)), 0, False, 0).grant == 0
    assert pool.counters.refused_full == 3
    pool.release(lease.lease)
    assert len(pool.store(R, A, chain_of((4, 5)), 0, False, 0).slots) == 2


def test_an_empty_pool_without_trays_answers() -> None:
    pool = directory()
    assert pool.lookup(R, A, chain_of((1,)), 0, 0).lease == 0
    assert pool.store(R, A, chain_of((1,)), 0, False, 0).grant == 0
    assert pool.next_deadline() is None


def test_only_what_the_pool_lacks_is_granted_and_never_behind_a_hole() -> None:
    pool = directory(8)
    put(pool, (1, 2))
    granted = pool.store(R, B, chain_of((1, 2, 3, 4)), 1, False, 0)
    assert (granted.from_block, len(granted.slots)) == (2, 2)
    assert pool.store(R, B, chain_of((9, 9, 9)), 1, False, 0).grant == 0  # the pool lacks block 0 and the writer has it no more
    assert pool.store(R, B, chain_of((1, 2)), 0, False, 0).grant == 0


def test_blocks_before_an_open_grant_stay() -> None:
    pool = directory(4)
    put(pool, (1, 2))
    open_grant = pool.store(R, A, chain_of((1, 2, 3)), 0, False, 0)
    assert len(pool.store(R, B, chain_of((7, 8, 9)), 0, False, 0).slots) == 1
    assert pool.commit(open_grant.grant) and found(pool, (1, 2, 3)) == 3


def test_a_lost_tray_takes_its_blocks_and_all_behind_them() -> None:
    pool = directory(2, 6)
    put(pool, (1, 2, 3, 4))  # blocks 0 and 1 near the writer, 2 and 3 on the other tray
    put(pool, (7, 8), rank=B)
    pool.take_events()
    lease = pool.lookup(R, B, chain_of((1, 2, 3, 4)), 0, 0)
    granted = pool.store(R, A, chain_of((1, 2, 3, 4, 5)), 0, False, 0)
    assert pool.segment_lost(0) and not pool.segment_lost(0)
    assert pool.take_events() == [Removed(chain_of((1, 2, 3, 4)), 0)]
    assert found(pool, (1, 2, 3, 4)) == 0 and found(pool, (7, 8)) == 2
    assert not pool.commit(granted.grant)  # what it hung from is gone
    assert pool.blocks.num_free == 2  # 6 - (7, 8) - the two that the reader may still be reading
    pool.check()
    pool.release(lease.lease)
    assert pool.blocks.num_free == 4 and pool.counters.lost == 4
    pool.segment_joined(2, 2, 0, A)
    assert put(pool, (1, 2)).slots == ((2, 0), (2, 1))
    pool.check()


def test_of_a_grant_over_two_trays_the_part_before_the_lost_one_is_published() -> None:
    pool = directory(2, 2, 1)
    granted = pool.store(R, A, chain_of((1, 2, 3, 4, 5)), 0, False, 0)
    assert [tray for tray, _ in granted.slots] == [0, 0, 1, 1, 2]
    pool.segment_lost(1)
    assert pool.commit(granted.grant)
    assert pool.blocks.num_free == 1
    pool.check()
    assert pool.take_events() == [Stored(chain_of((1, 2)), 0)] and found(pool, (1, 2, 3, 4)) == 2


def test_blocks_that_another_writer_published_first_are_given_back() -> None:
    pool = directory(2, 10)
    put(pool, (1, 2))
    slow = pool.store(R, A, chain_of((1, 2, 3, 4, 5)), 0, False, 0)
    pool.segment_lost(0)
    put(pool, (1, 2, 3, 4), rank=B)
    pool.take_events()
    assert pool.commit(slow.grant)
    assert pool.take_events() == [Stored(chain_of((1, 2, 3, 4, 5)), 4)]
    assert pool.blocks.num_free == 5
    pool.check()


@pytest.mark.parametrize(("window_tray", "lost"), [(1, 0), (2, 2)])
def test_a_resume_state_is_published_only_if_it_and_all_before_it_are_alive(window_tray: int, lost: int) -> None:
    pool = Directory(CONFIG, needs_window=True)
    for number, rank in ((0, None), (1, A), (2, None)):
        pool.segment_joined(number, 2, int(number == window_tray), rank)
    granted = pool.store(R, A, chain_of((1, 2, 3)), 0, True, 0)
    assert granted.slots == ((1, 0), (1, 1), (0, 0)) and granted.window_slot == (window_tray, 0)
    pool.segment_lost(lost)
    assert pool.commit(granted.grant)
    assert found(pool, (1, 2, 3)) == 0
    assert pool.windows.num_free == pool.windows.total
    pool.check()


def test_a_resume_state_given_twice_is_given_back() -> None:
    pool = directory(4, needs_window=True)
    put(pool, (1, 2))
    first, second = (pool.store(R, rank, chain_of((1, 2)), 0, True, 0) for rank in RANKS)
    assert pool.commit(first.grant) and not pool.commit(second.grant)
    assert pool.windows.num_free == 1
    pool.check()


def test_a_late_writers_resume_state_is_out_of_reach() -> None:
    pool = directory(4, needs_window=True, windows=1)
    late = pool.store(R, A, chain_of((1,)), 0, True, 0)
    pool.expire(100)
    assert pool.store(R, B, chain_of((2,)), 0, True, 100).window_slot is None
    pool.cancel(late.grant)
    assert pool.store(R, B, chain_of((3,)), 0, True, 100).window_slot == late.window_slot


def test_a_lost_trays_resume_states_are_not_granted() -> None:
    pool = directory(4, 4, needs_window=True)
    pool.segment_lost(0)
    assert pool.windows.total == 2
    assert put(pool, (1,), with_window=True).window_slot == (1, 0)


def test_a_prefix_matches_only_up_to_a_resume_state() -> None:
    pool = directory(8, needs_window=True)
    put(pool, (1, 2), with_window=True)
    put(pool, (1, 2, 3, 4))
    assert found(pool, (1, 2, 3, 4)) == 2
    granted = pool.store(R, A, chain_of((1, 2, 3, 4)), 0, True, 0)  # only the resume state is missing
    assert granted.slots == () and granted.window_slot is not None
    assert pool.commit(granted.grant)
    answer = pool.lookup(R, B, chain_of((1, 2, 3, 4)), 1, 0)
    assert (answer.from_block, len(answer.slots), answer.window_slot) == (1, 3, granted.window_slot)
    assert pool.store(R, A, chain_of((1, 2, 3, 4)), 0, True, 0).grant == 0
    pool.check()


def test_a_resume_state_is_granted_only_with_all_blocks_before_it() -> None:
    pool = directory(3, needs_window=True)
    granted = pool.store(R, A, chain_of((1, 2, 3, 4)), 0, True, 0)
    assert len(granted.slots) == 3 and granted.window_slot is None


def test_hits_and_misses_count_blocks_beyond_the_readers_own() -> None:
    pool = directory(8)
    put(pool, (1, 2, 3))
    pool.lookup(R, B, chain_of((1, 2, 3, 4, 5)), 1, 0)
    assert (pool.counters.hits, pool.counters.misses) == (2, 2)
    pool.lookup(R, B, chain_of((1, 2, 3, 4, 5)), 4, 0)
    assert (pool.counters.hits, pool.counters.misses) == (2, 3)
    assert pool.counters.stored == count(chain_of((1, 2, 3)))


def test_a_lease_must_last() -> None:
    with pytest.raises(ConfigError, match=r"pool.lease_ns must be at least 1, got 0"):
        PoolConfig(lease_ns=0)
