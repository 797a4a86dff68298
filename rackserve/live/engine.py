"""The engine thread of a rank process."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from rackserve.base.errors import InvariantError
from rackserve.base.ids import NodeId
from rackserve.base.messages import EngineFailed, Message, StepFinished
from rackserve.base.step import GroupStep, StepResult
from rackserve.base.units import Time
from rackserve.live.host import LiveHost
from rackserve.live.step_times import StepTimes

MAX_IN_FLIGHT = 2


class Computing(Protocol):
    """What computes group steps, all ranks of each; an exception fails the step."""

    @property
    def kernel_ns(self) -> Sequence[Time]:
        """Time that each rank spent in kernels so far."""

    def run(self, step: GroupStep) -> tuple[StepResult, ...]: ...


class ThreadEngine:
    """Engine port of worker `node`: has `group` run group steps one after the other, on a thread of its own.

    `steps_done` and `step_started_ns` (0: no step is running) tell how it gets on. `has_requests` says whether there is
    anything that an idle engine keeps waiting.
    """

    __slots__ = ("_computed_ns", "_group", "_host", "_in_flight", "_kernel_ns", "_node", "_num_ranks", "_queue", "_thread",
                 "_wait_ns", "_waits_since", "has_requests", "step_started_ns", "steps_done")  # fmt: skip

    def __init__(self, host: LiveHost, node: NodeId, num_ranks: int, group: Computing) -> None:
        self._host = host
        self._node = node
        self._num_ranks = num_ranks
        self._group = group
        self._in_flight = 0
        self.has_requests: Callable[[], bool] = _unknown
        self._kernel_ns: Sequence[Time] = (0,) * num_ranks
        self._computed_ns: Time = 0
        self._wait_ns: Time = 0
        self._waits_since: Time = 0  # while there is no step and there are requests
        host.after_turn = self.look
        self._queue: queue.SimpleQueue[GroupStep | None] = queue.SimpleQueue()
        self.steps_done = 0
        self.step_started_ns: Time = 0
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def start(self, step: GroupStep) -> None:
        if self._in_flight >= MAX_IN_FLIGHT:
            raise InvariantError(f"step {step.number} was started with {self._in_flight} steps in flight")
        if len(step.steps) != self._num_ranks:
            raise InvariantError(f"step {step.number} has {len(step.steps)} parts for a group of {self._num_ranks}")
        self._end_wait()
        self._in_flight += 1
        self._queue.put(step)

    def look(self) -> None:
        """See whether anything waits for the engine, after messages that may have changed that."""
        if self._in_flight:
            return
        if not self.has_requests():
            self._end_wait()
        elif not self._waits_since:
            self._waits_since = time.monotonic_ns()

    def times(self) -> tuple[StepTimes, ...]:
        """Where the time of each rank went so far."""
        beside = self._computed_ns + self._host.busy_ns
        waits = time.monotonic_ns() - self._waits_since if self._waits_since else 0
        return tuple(StepTimes(kernel, beside - kernel, self._wait_ns + waits) for kernel in self._kernel_ns)

    def interrupt(self) -> None:
        """Nothing to do: steps have one forward pass each here."""

    def close(self) -> None:
        """Let the thread end after the steps it has; their ends are delivered only if the loop goes on."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (step := self._queue.get()) is not None:
            self.step_started_ns = begin = time.monotonic_ns()
            message: Message
            try:
                message = StepFinished(step.number, self._group.run(step), time.monotonic_ns() - begin)
            except Exception as error:
                traceback.print_exc()
                message = EngineFailed(step.number, f"{type(error).__name__}: {error}")
            self.steps_done += 1
            self.step_started_ns = 0
            self._host.post_from_thread(partial(self._end, message, begin, time.monotonic_ns(), tuple(self._group.kernel_ns)))

    def _end(self, message: Message, begin: Time, end: Time, kernel_ns: Sequence[Time]) -> None:
        self._in_flight -= 1
        self._computed_ns += end - begin
        self._kernel_ns = kernel_ns
        if not self._in_flight:
            self._waits_since = end
        self._host.post(self._node, message, bounded=False)

    def _end_wait(self) -> None:
        if self._waits_since:
            self._wait_ns += time.monotonic_ns() - self._waits_since
            self._waits_since = 0


def _unknown() -> bool:
    return False
