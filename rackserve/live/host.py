"""The event loop side of a process: which nodes live here, in what order messages reach them, and their timers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from rackserve.base.errors import InvariantError
from rackserve.base.ids import NodeId
from rackserve.base.messages import Message
from rackserve.base.units import Time, to_seconds
from rackserve.ports import Node

INBOX_LIMIT = 1 << 16
"""Messages that may wait in a process."""

TIMER_LIMIT = 1 << 21
"""Timers that may be pending in a process."""

BURST = 256
"""Messages handled before the loop looks at its sockets again."""


class LiveHost:
    """Delivers messages to the nodes of this process, one after the other: a handler is never entered while one runs.

    `on_crash` is called once, with the first error a handler raised; from then on nothing is delivered, because the node's
    state can no longer be trusted.

    busy_ns     time spent in handlers so far
    after_turn  called after each turn of handlers
    """

    __slots__ = ("_inbox", "_loop", "_nodes", "_on_crash", "_running", "_scheduled", "_stopped", "_timers", "after_turn",
                 "busy_ns")  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, on_crash: Callable[[BaseException], None]) -> None:
        self._loop = loop
        self._on_crash = on_crash
        self._nodes: dict[NodeId, Node] = {}
        self._inbox: deque[tuple[Node, Message]] = deque()
        self._timers = 0
        self._running = self._scheduled = self._stopped = False
        self.busy_ns: Time = 0
        self.after_turn: Callable[[], None] = _nothing

    def add(self, node_id: NodeId, node: Node) -> None:
        """Register `node`. Raises InvariantError if the id is taken."""
        if node_id in self._nodes:
            raise InvariantError(f"node {node_id} exists")
        self._nodes[node_id] = node

    def has(self, node_id: NodeId) -> bool:
        return node_id in self._nodes

    def post(self, to: NodeId, message: Message, *, bounded: bool = True) -> bool:
        """Queue `message`, to be handled after all queued before it. False: the inbox is full or nobody has that name.

        `bounded=False` is for the ends of timers, steps and transfers: they must not be lost, and their starts are bounded.
        """
        node = self._nodes.get(to)
        if node is None or (bounded and len(self._inbox) >= INBOX_LIMIT):
            return False
        self._inbox.append((node, message))
        if not self._scheduled and not self._running:
            self._scheduled = True
            self._loop.call_soon(self._run)
        return True

    def post_from_thread(self, action: Callable[[], object]) -> None:
        """Run `action` on the loop; the one call other threads may make. Ignored when the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def call_at(self, when: Time, to: NodeId, message: Message) -> None:
        """Post `message` to `to` at monotonic time `when`, never before. Raises InvariantError above TIMER_LIMIT timers."""
        if self._timers >= TIMER_LIMIT:
            raise InvariantError(f"more than {TIMER_LIMIT} timers are pending, the last one asked for by {to}")
        self._timers += 1
        self._loop.call_at(to_seconds(when), self._ring, when, to, message)

    def deliver(self) -> None:
        """Handle queued messages now instead of at the loop's next turn. Only for callbacks of the loop itself."""
        if not self._running:
            self._run()

    def crash(self, error: BaseException) -> None:
        """Stop all delivery because of `error`."""
        if not self._stopped:
            self._stopped = True
            self._inbox.clear()
            self._on_crash(error)

    def _ring(self, when: Time, to: NodeId, message: Message) -> None:
        if time.monotonic_ns() < when:  # the loop rounds times to floats
            self._loop.call_later(1e-6, self._ring, when, to, message)
            return
        self._timers -= 1
        self.post(to, message, bounded=False)

    def _run(self) -> None:
        self._scheduled = False
        self._running = True
        begin = time.monotonic_ns()
        try:
            for _ in range(BURST):
                if self._stopped or not self._inbox:
                    break
                node, message = self._inbox.popleft()
                node.handle(message)
        except Exception as error:
            self.crash(error)
        finally:
            self._running = False
            self.busy_ns += time.monotonic_ns() - begin
        self.after_turn()
        if self._inbox and not self._stopped and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)


def _nothing() -> None:
    pass
