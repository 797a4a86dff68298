"""An engine that takes modelled time. With runners it computes real outputs (the digest model); without, tokens are made up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from rackserve.base.errors import InvariantError
from rackserve.base.ids import NodeId
from rackserve.base.messages import EngineFailed, StepFinished
from rackserve.base.step import GroupStep, ItemResult, Step, StepResult
from rackserve.base.units import Time
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.host import SimHost

StepTime = Callable[[Step], Time]
"""Modelled duration of one rank's step, in nanoseconds."""


class Runner(Protocol):
    """Computes a rank's step over its arena."""

    def run(self, step: Step) -> StepResult: ...


class TimedRunner:
    """Makes up output: token 1, and as many accepted draft tokens as `accept` says for (sequence, position)."""

    def __init__(self, accept: Callable[[int, int, int], int] | None = None) -> None:
        self._accept = accept

    def run(self, step: Step) -> StepResult:
        items = []
        for item in step.items:
            extra = self._accept(item.sequence, item.start, item.num_draft) if self._accept and item.num_draft else 0
            tokens = (1,) * (1 + extra) if item.sample else ()
            items.append(ItemResult(item.sequence, tokens, num_verified=item.num_draft if item.sample else 0))
        return StepResult(step.dp_rank, tuple(items))


class SimEngine:
    """Engine port of one worker: steps run one after another, at most two are in flight."""

    def __init__(
        self, host: SimHost, name: NodeId, runners: list[Runner], step_time: StepTime, limits: SchedulerConfig
    ) -> None:
        self._host = host
        self._name = name
        self._life = host.life(name) + 1  # the engine is made just before its node is added
        self._runners = runners
        self._step_time = step_time
        self._limits = limits
        self._queue: deque[GroupStep] = deque()
        self.slowdown = 1.0
        self.fail_next: str | None = None

    def start(self, step: GroupStep) -> None:
        self._queue.append(step)
        self._check(step)
        if len(self._queue) == 1:
            self._begin()

    def _check(self, step: GroupStep) -> None:
        """Law I7: budgets hold, each sequence is in a step once, no position is in two steps in flight."""
        if len(self._queue) > self._limits.max_steps_in_flight:
            raise InvariantError(f"{self._name}: {len(self._queue)} steps in flight (I7)")
        ends: dict[tuple[int, int], int] = {}
        for flying in self._queue:
            for part in flying.steps:
                tokens = sum(item.num_tokens + item.num_draft for item in part.items)
                if tokens > self._limits.max_batched_tokens:
                    raise InvariantError(f"{self._name}: a step of {tokens} tokens (I7)")
                if len({item.sequence for item in part.items}) < len(part.items):
                    raise InvariantError(f"{self._name}: a sequence is twice in one step (I7)")
                for item in part.items:
                    if item.start < ends.get((part.dp_rank, item.sequence), 0):
                        raise InvariantError(f"{self._name}: position {item.start} is in two steps in flight (I7)")
                    ends[part.dp_rank, item.sequence] = item.start + item.num_tokens

    def _begin(self) -> None:
        step = self._queue[0]
        duration = round(max(self._step_time(part) for part in step.steps) * self.slowdown)
        self._host.call(self._host.now + duration, lambda: self._finish(step, duration))

    def _finish(self, step: GroupStep, duration: Time) -> None:
        if self._host.life(self._name) != self._life:
            return  # the worker died while the step ran: nothing is written
        if self.fail_next is not None:
            for lost in self._queue:
                self._host.post(self._name, self._host.now, EngineFailed(lost.number, self.fail_next))
            self._queue.clear()
            self.fail_next = None
            return
        self._queue.popleft()
        results = tuple(runner.run(part) for runner, part in zip(self._runners, step.steps, strict=True))
        self._host.post(self._name, self._host.now, StepFinished(step.number, results, duration))
        if self._queue:
            self._begin()
