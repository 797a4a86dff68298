"""States follow the table; anything else is a bug."""

from __future__ import annotations

import typing

import pytest

from rackserve.base.errors import InvariantError
from rackserve.base.keys import count, extend_chain
from rackserve.sched.sequence import ENDED, TRANSITIONS, State
from tests.sched.desk import BLOCK, sequence_of

STATES = typing.get_args(State)


@pytest.mark.parametrize("source", STATES)
@pytest.mark.parametrize("target", STATES)
def test_only_listed_transitions_are_allowed(source: State, target: State) -> None:
    sequence = sequence_of(1, 4)
    sequence.state = source
    if target in TRANSITIONS[source]:
        sequence.move(target)
        assert sequence.state == target
    else:
        with pytest.raises(InvariantError, match=f"request r1 attempt 1: {source} -> {target}"):
            sequence.move(target)


def test_every_state_can_end_and_no_end_can_be_left() -> None:
    for state in STATES:
        if state in ENDED:
            assert TRANSITIONS[state] == ()
        else:
            assert "aborted" in TRANSITIONS[state]


def test_generated_tokens_extend_the_chain_as_the_next_turn_will() -> None:
    """Turn two is turn one, its answer and more: the keys must be those the sequence left behind."""
    sequence = sequence_of(1, 6)
    for token in (50, 51, 52, 53, 54):
        sequence.outputs.append(token)
        sequence.tokens.append(token)
    assert sequence.num_known == 11
    assert count(sequence.extend_chain_to(2, BLOCK)) == 2
    assert sequence.chain == extend_chain(b"", b"r" * 16, sequence.tokens[:8].tobytes(), BLOCK)


def test_token_bytes_are_the_ids_of_the_positions_asked_for() -> None:
    sequence = sequence_of(2, 6)
    assert sequence.token_bytes(1, 2) == b"\xc9\0\0\0\xca\0\0\0"


def test_a_sequence_without_blocks_has_no_table() -> None:
    with pytest.raises(InvariantError, match="holds no blocks"):
        _ = sequence_of(1, 4).block_table


def test_two_slots_take_turns_along_the_output_and_none_without_stored_state() -> None:
    sequence = sequence_of(1, 5)
    assert [sequence.state_slot(blocks) for blocks in (3, 4)] == [-1, -1]
    sequence.end_slot = 9
    assert sequence.state_slot(3) == -1
    sequence.boundary_slot = 4
    assert [sequence.state_slot(blocks) for blocks in (3, 4, 5)] == [9, 4, 9]


def test_what_is_present_begins_with_the_shared_blocks() -> None:
    sequence = sequence_of(1, 20)
    sequence.computed, sequence.replay_end = 3, 8
    assert sequence.num_present == 8
    sequence.computed = 9
    assert sequence.num_present == 9
