from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.kv.arena import Arena


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_every_slot_is_free_or_owned_once(ops: list[tuple[bool, int]]) -> None:
    """Naive model: the list of owned groups of slots."""
    arena, owned = Arena(8), list[list[int]]()
    for taking, number in ops:
        if taking:
            left = 8 - sum(map(len, owned))
            slots = arena.allocate(number)
            assert (slots is None) == (number > left)
            owned += [slots] if slots is not None else []
        elif owned:
            arena.free(owned.pop(number % len(owned)))
        held = [slot for group in owned for slot in group]
        assert len(set(held)) == len(held) and set(held) <= set(range(8))
        assert arena.num_free == 8 - len(held)
        arena.check(held)


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    arena = Arena(3)
    assert arena.allocate(4) is None and arena.num_free == 3
    assert arena.allocate(0) == []


@pytest.mark.parametrize("slot", [1, 3, -1])
def test_a_slot_that_is_not_given_out_cannot_be_freed(slot: int) -> None:
    arena = Arena(3)
    arena.free(arena.allocate(2) or [])
    with pytest.raises(InvariantError, match="not given out"):
        arena.free([slot])


@pytest.mark.parametrize("owned", [[0], [0, 1, 1], [0, 1, 2]])
def test_check_finds_lost_and_shared_slots(owned: list[int]) -> None:
    arena = Arena(4)
    arena.allocate(2)
    with pytest.raises(InvariantError):
        arena.check(owned)
