"""The real clock: CLOCK_MONOTONIC in nanoseconds, the same in all processes of a machine."""

from __future__ import annotations

import time

from rackserve.base.ids import NodeId
from rackserve.base.messages import Message
from rackserve.base.units import Time
from rackserve.live.host import LiveHost


class LiveClock:
    """Clock port of one node."""

    __slots__ = ("_host", "_node")

    def __init__(self, host: LiveHost, node: NodeId) -> None:
        self._host = host
        self._node = node

    def now(self) -> Time:
        return time.monotonic_ns()

    def call_at(self, when: Time, message: Message) -> None:
        self._host.call_at(when, self._node, message)
