"""A group plans for all its ranks at once."""

from __future__ import annotations

import pytest

from rackserve.base.errors import InvariantError
from rackserve.base.step import ItemResult, StepResult
from rackserve.sched.lockstep import LockstepGroup
from tests.sched.desk import Desk, nameless, sequence_of


def group(max_in_flight: int = 1) -> tuple[LockstepGroup, list[Desk]]:
    desks = [Desk(max_steps_in_flight=max_in_flight), Desk(max_steps_in_flight=max_in_flight)]
    return LockstepGroup([desk.scheduler for desk in desks], max_in_flight), desks


def results(lockstep: LockstepGroup) -> tuple[StepResult, ...]:
    step = next(iter(lockstep._in_flight.values()))
    return tuple(StepResult(0, tuple(ItemResult(i.sequence, (7,) if i.sample else ()) for i in s.items)) for s in step.steps)


def test_a_rank_without_work_takes_a_dummy_step() -> None:
    lockstep, desks = group()
    desks[1].add(sequence_of(1, 4))
    step = lockstep.plan().step
    assert step is not None
    assert [len(part.items) for part in step.steps] == [0, 1]


def test_no_rank_has_work_no_step() -> None:
    lockstep, _ = group()
    assert lockstep.plan().step is None
    assert not lockstep.has_work


def test_work_that_comes_while_a_step_runs_waits_for_its_end_unless_two_may_fly() -> None:
    for max_in_flight in (1, 2):
        lockstep, desks = group(max_in_flight)
        desks[0].add(sequence_of(1, 4))
        assert lockstep.plan().step is not None
        desks[1].add(sequence_of(2, 4))
        assert (lockstep.plan().step is not None) == (max_in_flight == 2)
        assert lockstep.num_in_flight == max_in_flight


def test_steps_finish_in_the_order_they_started() -> None:
    lockstep, desks = group(2)
    desks[0].add(sequence_of(1, 16))
    first, second = lockstep.plan().step, lockstep.plan().step
    assert first is not None and second is not None
    with pytest.raises(InvariantError, match="out of order"):
        lockstep.finish(second.number, ())
    done, progress, _ = lockstep.finish(first.number, results(lockstep))
    assert (done, progress[0].num_computed) == (first, 8)
    with pytest.raises(InvariantError, match="out of order"):
        lockstep.fail(first.number)


def test_a_failed_step_names_everyone_in_it() -> None:
    lockstep, desks = group()
    sequences = [desks[0].add(sequence_of(1, 4)), desks[1].add(sequence_of(2, 4))]
    step = lockstep.plan().step
    assert step is not None
    assert lockstep.fail(step.number) == sequences
    assert [sequence.holds for sequence in sequences] == [0, 0]
    assert lockstep.num_in_flight == 0


def test_a_step_of_many_passes_is_interrupted_once_and_only_when_sequences_come_or_leave() -> None:
    desks = [Desk(carry=True, max_steps_in_flight=1, max_batched_tokens=64, max_sequences=8) for _ in range(2)]
    lockstep = LockstepGroup([desk.scheduler for desk in desks], 1)
    first = nameless(1, desks[0])
    planned = lockstep.plan()
    assert planned.step is not None
    assert planned.step.tokens == 3  # then its two blocks are full
    assert not lockstep.interrupts()
    nameless(2, desks[1])
    assert lockstep.interrupts()
    assert not lockstep.interrupts()
    (item,) = planned.step.steps[0].items
    results = (StepResult(0, (ItemResult(item.sequence, (1, 1)),), 2, 2), StepResult(1, (), 2, 2))
    _, progress, _ = lockstep.finish(planned.step.number, results)
    assert progress == []  # it goes on
    second = lockstep.plan().step
    assert second is not None
    assert [(part.carried, part.carried_context, len(part.items)) for part in second.steps] == [(1, 7, 0), (0, 0, 1)]
    assert second.tokens == 1
    done = (StepResult(0, ()), StepResult(1, (ItemResult(2, (1,)),)))
    _, progress, _ = lockstep.finish(second.number, done)
    assert progress == []
    assert (first.num_known, len(first.block_table)) == (9, 2)
    third = lockstep.plan().step
    assert third is not None
    assert [(part.carried, len(part.items)) for part in third.steps] == [(1, 0), (1, 0)]
    assert (third.tokens, len(first.block_table)) == (2, 3)
