"""The engine thread of a rank process."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial

from rackserve.base.errors import InvariantError
from rackserve.base.ids import NodeId
from rackserve.base.messages import EngineFailed, Message, StepFinished
from rackserve.base.step import GroupStep, StepResult
from rackserve.base.units import Time
from rackserve.live.host import LiveHost

MAX_IN_FLIGHT = 2


class ThreadEngine:
    """Engine port of worker `node`: runs group steps one after the other on a thread of its own.

    `run` gives the results of all `num_ranks` ranks; an exception fails the step.
    `steps_done` and `step_started_ns` (0: no step is running) tell how it gets on.
    """

    __slots__ = ("_host", "_in_flight", "_node", "_num_ranks", "_queue", "_run", "_thread", "step_started_ns", "steps_done")

    def __init__(
        self, host: LiveHost, node: NodeId, num_ranks: int, run: Callable[[GroupStep], tuple[StepResult, ...]]
    ) -> None:
        self._host = host
        self._node = node
        self._num_ranks = num_ranks
        self._run = run
        self._in_flight = 0
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
        self._in_flight += 1
        self._queue.put(step)

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
                message = StepFinished(step.number, self._run(step), time.monotonic_ns() - begin)
            except Exception as error:
                traceback.print_exc()
                message = EngineFailed(step.number, f"{type(error).__name__}: {error}")
            self.steps_done += 1
            self.step_started_ns = 0
            self._host.post_from_thread(partial(self._end, message))

    def _end(self, message: Message) -> None:
        self._in_flight -= 1
        self._host.post(self._node, message, bounded=False)
