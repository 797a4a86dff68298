"""Segments against a naive set of slots per state."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Rank
from rackserve.pool.segments import Segments, decode, decode_all, encode

ACTIONS = st.tuples(
    st.sampled_from(["allocate", "allocate", "free", "quarantine", "join", "lose"]), st.integers(0, 6), st.integers(0, 3)
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_each_slot_is_in_one_state_and_handed_out_once(actions: list[tuple[str, int, int]]) -> None:
    segments, joined = Segments(), 0
    alive: set[int] = set()
    free: set[int] = set()
    used: list[int] = []
    quarantined: list[int] = []
    for kind, number, which in actions:
        if kind == "join":
            segments.join(joined, number)
            free |= {encode(joined, index) for index in range(number)}
            alive.add(joined)
            joined += 1
        elif kind == "lose":
            assert segments.lose(which) == (which in alive)
            alive.discard(which)
            free = {slot for slot in free if decode(slot)[0] != which}
        elif kind == "allocate":
            slots = segments.allocate(number, which)
            assert len(slots) == min(number, len(free)) and len(set(slots)) == len(slots) and set(slots) <= free
            used += slots
            free -= set(slots)
        elif kind == "quarantine":
            segments.quarantine(used[:number])
            quarantined, used = quarantined + used[:number], used[number:]
        else:
            both = used[:number] + quarantined[:which]
            segments.free(both)
            used, quarantined = used[number:], quarantined[which:]
            free |= {slot for slot in both if segments.is_alive(slot)}
        segments.check(used, quarantined)
        assert segments.num_free == len(free)
        assert segments.total == len(free) + sum(map(segments.is_alive, used + quarantined))


def test_encoding_is_reversible() -> None:
    for segment, index in ((0, 0), (1, 0), (71, 2**32 - 1)):
        assert decode(encode(segment, index)) == (segment, index)
        assert decode_all([encode(segment, index), encode(0, 1)]) == ((segment, index), (0, 1))


def test_the_preferred_segment_is_filled_first_then_the_emptiest() -> None:
    segments = Segments()
    for number, slots in ((3, 2), (1, 4), (2, 6)):
        segments.join(number, slots)
    assert [decode(slot)[0] for slot in segments.allocate(9, prefer=3)] == [3, 3, 2, 2, 2, 2, 2, 2, 1]
    assert [decode(slot)[0] for slot in segments.allocate(9, prefer=None)] == [1, 1, 1]


def test_a_segment_is_near_to_all_ranks_of_its_worker() -> None:
    segments = Segments()
    segments.join(0, 1)
    segments.join(1, 1, Rank("prefill0"))
    assert segments.near(Rank("prefill0", 1)) == 1 and segments.near(Rank("prefill1")) is None


def test_freeing_twice_is_a_bug_unless_the_tray_is_lost() -> None:
    segments = Segments()
    segments.join(0, 2)
    slots = segments.allocate(2)
    segments.free(slots[:1])
    with pytest.raises(InvariantError, match="freed twice"):
        segments.free(slots[:1])
    with pytest.raises(InvariantError, match="not in use"):
        segments.quarantine(slots[:1])
    assert segments.lose(0) and not segments.lose(0)
    segments.free(slots)
    segments.quarantine(slots)
    assert segments.total == segments.num_free == 0


def test_a_segment_number_is_never_used_again() -> None:
    segments = Segments()
    segments.join(0, 2)
    segments.lose(0)
    with pytest.raises(InvariantError, match="needs a new number"):
        segments.join(0, 2)
