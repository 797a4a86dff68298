"""Ranks that run their steps together: a group's step begins when any rank has work and ends when its slowest rank does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rackserve.base.errors import InvariantError
from rackserve.base.step import GroupStep, StepResult
from rackserve.sched.scheduler import Progress, Scheduler
from rackserve.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Planned:
    """A group step to start (or None), and what its planning led to.

    preempted   sequences that gave up their blocks
    reports     output of carried sequences that is known now; sequences may be among the preempted
    started     sequences that are in a step for the first time
    """

    step: GroupStep | None
    preempted: Collection[Sequence] = ()
    reports: Collection[Progress] = ()
    started: Collection[Sequence] = ()


NOTHING = Planned(None)


class LockstepGroup:
    """Plans group steps over the schedulers of a worker's ranks; ranks without work take dummy steps.

    Law I8: whenever a sequence has pending positions and fewer than `max_in_flight` steps are in flight, `plan` yields a step.
    """

    def __init__(self, schedulers: list[Scheduler], max_in_flight: int) -> None:
        self.schedulers = schedulers
        self._max_in_flight = max_in_flight
        self._in_flight: dict[int, GroupStep] = {}
        self._number = 0
        self._repeats = False  # the step in flight goes on until it is interrupted

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return any(scheduler.has_work for scheduler in self.schedulers)

    def plan(self) -> Planned:
        """The next group step if one may start now."""
        if len(self._in_flight) >= self._max_in_flight:
            return NOTHING
        preempted: list[Sequence] = []
        reports: list[Progress] = []
        started: list[Sequence] = []
        steps = []
        for scheduler in self.schedulers:
            step, evicted = scheduler.plan()
            steps.append(step)
            preempted += evicted
            if scheduler.reports:
                reports += scheduler.reports
                scheduler.reports.clear()
            if scheduler.started:
                started += scheduler.started
                scheduler.started.clear()
        if not any(steps):
            return Planned(None, preempted, reports)
        self._number += 1
        whole = tuple([step or scheduler.dummy() for step, scheduler in zip(steps, self.schedulers, strict=True)])
        group_step = GroupStep(self._number, whole, min([scheduler.room for scheduler in self.schedulers]))
        self._in_flight[self._number] = group_step
        self._repeats = group_step.tokens > 1
        return Planned(group_step, preempted, reports, started)

    def interrupts(self) -> bool:
        """Whether the step in flight should end early because sequences came or left since it was planned; True once."""
        if self._repeats and self._in_flight and any(scheduler.changed for scheduler in self.schedulers):
            self._repeats = False
            return True
        return False

    def finish(self, number: int, results: tuple[StepResult, ...]) -> tuple[GroupStep, list[Progress], list[Sequence]]:
        """Take the results of a step in; steps finish in the order they started.

        Returns the step, what it did, and the sequences that ended while it ran and may let go of their blocks now.
        """
        group_step = self._take(number)
        progress: list[Progress] = []
        left: list[Sequence] = []
        for scheduler, step, result in zip(self.schedulers, group_step.steps, results, strict=True):
            done, ended = scheduler.apply(step, result)
            progress += done
            left += ended
        return group_step, progress, left

    def fail(self, number: int) -> list[Sequence]:
        """The engine lost a step: the sequences in it."""
        group_step = self._take(number)
        lost: list[Sequence] = []
        for scheduler, step in zip(self.schedulers, group_step.steps, strict=True):
            lost.extend(scheduler.fail(step))
        return lost

    def _take(self, number: int) -> GroupStep:
        if not self._in_flight or next(iter(self._in_flight)) != number:
            raise InvariantError(f"step {number} finished out of order; in flight: {list(self._in_flight)}")
        return self._in_flight.pop(number)
