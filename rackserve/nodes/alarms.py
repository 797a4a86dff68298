"""A node's deadlines over one clock: an alarm that is no longer needed is cleared, so long waits do not pile up."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from rackserve.base.messages import Timeout
from rackserve.base.units import Time
from rackserve.ports import Clock

WAKE = "wake"
"""Kind of the message the clock is asked for; `Timeout(WAKE, "")` belongs to `Alarms.wake`."""


class Alarms:
    """At most one alarm of a kind per (key, attempt). `ring` is called with each that is due, in order of their times."""

    def __init__(self, clock: Clock, ring: Callable[[Timeout], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._set: dict[tuple[str, int], dict[str, Time]] = {}
        self._num_set = 0
        self._heap: list[tuple[Time, int, Timeout]] = []
        self._order = 0
        self._asked: set[Time] = set()
        self._first_asked: Time | None = None

    def __len__(self) -> int:
        return self._num_set

    def set(self, when: Time, timeout: Timeout) -> None:
        """Ring `timeout` at `when`, in place of an earlier alarm of its kind, key and attempt."""
        key = (timeout.key, timeout.attempt)
        kinds = self._set.get(key)
        if kinds is None:
            kinds = self._set[key] = {}
        self._num_set += timeout.kind not in kinds
        kinds[timeout.kind] = when
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, timeout))
        if len(self._heap) > 64 + 4 * self._num_set:
            self._heap = [entry for entry in self._heap if self._is_set(entry)]
            heapq.heapify(self._heap)
        self._ask()

    def clear(self, key: str, attempt: int = 0) -> None:
        """No alarm of this key and attempt will ring any more."""
        self._num_set -= len(self._set.pop((key, attempt), ()))

    def wake(self) -> None:
        """The clock's message has come: ring what is due."""
        now = self._clock.now()
        self._asked = {when for when in self._asked if when > now}
        self._first_asked = min(self._asked, default=None)
        while self._heap and (self._heap[0][0] <= now or not self._is_set(self._heap[0])):
            entry = heapq.heappop(self._heap)
            if self._is_set(entry):
                timeout = entry[2]
                kinds = self._set[timeout.key, timeout.attempt]
                del kinds[timeout.kind]
                self._num_set -= 1
                if not kinds:
                    del self._set[timeout.key, timeout.attempt]
                self._ring(timeout)
        self._ask()

    def _is_set(self, entry: tuple[Time, int, Timeout]) -> bool:
        when, _, timeout = entry
        return self._set.get((timeout.key, timeout.attempt), {}).get(timeout.kind) == when

    def _ask(self) -> None:
        """One clock message for the earliest alarm; later ones are asked for when it has come."""
        if self._heap:
            first = self._heap[0][0]
            if self._first_asked is None or first < self._first_asked:
                self._asked.add(first)
                self._first_asked = first
                self._clock.call_at(first, Timeout(WAKE, ""))
