"""Where a resume state is left, case by case."""

from __future__ import annotations

from rackserve.base.step import StepItem
from rackserve.sched.sequence import Sequence
from rackserve.sched.states import chunk, note_state, snapshot
from tests.sched.desk import BLOCK, sequence_of


def storing(num_tokens: int) -> Sequence:
    """A sequence with slots 5 (boundary), 6 (end of the prompt) and 9 (where others part, after block 1)."""
    sequence = sequence_of(1, num_tokens, 20)
    sequence.boundary_slot, sequence.end_slot, sequence.branches = 5, 6, {1: 9}
    return sequence


def test_a_chunk_ends_at_the_first_boundary_that_is_wanted() -> None:
    sequence = storing(14)
    assert chunk(sequence, 0, 14, BLOCK) == 4
    assert chunk(sequence, 4, 10, BLOCK) == 8
    assert chunk(sequence, 12, 2, BLOCK) == 2
    assert chunk(sequence_of(1, 14), 0, 14, BLOCK) == 14


def test_the_state_of_a_prompt_is_left_at_wanted_boundaries_and_its_end() -> None:
    sequence = storing(14)
    assert [snapshot(sequence, 0, end, 0, BLOCK) for end in (4, 8, 12, 13, 14)] == [
        (9, 4),
        (-1, -1),
        (5, 12),
        (-1, -1),
        (6, 14),
    ]


def test_the_state_of_the_output_is_left_where_a_step_may_reach_a_boundary() -> None:
    sequence = storing(14)
    assert snapshot(sequence, 14, 15, 0, BLOCK) == (-1, -1)
    assert snapshot(sequence, 14, 15, 1, BLOCK) == (sequence.state_slot(4), 16)


def test_a_state_counts_only_if_the_step_got_that_far() -> None:
    sequence = storing(14)
    item = StepItem(1, 14, 1, b"", (), True, snapshot=sequence.state_slot(4), snapshot_at=16)
    sequence.computed = 15
    note_state(sequence, item, BLOCK)
    assert sequence.boundary == -1
    sequence.computed = 16
    note_state(sequence, item, BLOCK)
    assert sequence.boundary == 4
    note_state(sequence, StepItem(1, 0, 4, b"", (), False, snapshot=9, snapshot_at=4), BLOCK)
    assert (sequence.branched, sequence.stored) == ([1], [(1, 9)])
