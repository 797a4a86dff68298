"""Virtual time: nodes, messages and timers on one heap."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush

import msgspec

from rackserve.base.events import Event, MessageDropped
from rackserve.base.ids import NodeId
from rackserve.base.messages import Message
from rackserve.base.units import Time
from rackserve.ports import Node

Filter = Callable[[NodeId, NodeId, Message], list[Time]]
"""(source, target, message) -> extra delay of each copy to deliver; an empty list loses the message."""

HOST: NodeId = ""
"""Receiver of what the host itself does."""

NEVER: Time = 1 << 62

ON_TIME: list[Time] = [0]


class SimHost:
    """Runs nodes on a virtual clock. Ties are broken by order of scheduling, so a run is a function of its inputs.

    latency_ns  time a message takes between two nodes; first in, first out per pair whatever the delays
    """

    def __init__(self, latency_ns: Callable[[NodeId, NodeId], Time] | None = None) -> None:
        self.now: Time = 0
        self.num_events = 0
        self.nodes: dict[NodeId, Node] = {}
        self.filter: Filter | None = None
        self.after_event: Callable[[], None] | None = None
        self.sinks: list[Callable[[Time, NodeId, Event], None]] = []
        self._latency = latency_ns or (lambda source, target: 0)
        self._heap: list[tuple[Time, int, NodeId, int, Message | Callable[[], None]]] = []
        self._counter = 0
        self._links: dict[tuple[NodeId, NodeId], list[Time]] = {}  # pair -> its latency, when its last message arrives
        self._lives: dict[NodeId, int] = {}
        self._digest = blake2b(digest_size=16)
        self._encode = msgspec.msgpack.Encoder().encode
        self.keeps_digest = True

    # ------------------------------------------------------------ nodes

    def add(self, name: NodeId, node: Node) -> None:
        """A node joins (or returns); messages and timers of an earlier life never reach it."""
        self.nodes[name] = node
        self._lives[name] = self._lives.get(name, 0) + 1

    def life(self, name: NodeId) -> int:
        return self._lives.get(name, 0)

    def remove(self, name: NodeId) -> None:
        """A node is gone at once, with everything addressed to it."""
        self.nodes.pop(name, None)
        self._lives[name] = self._lives.get(name, 0) + 1

    # ------------------------------------------------------------ scheduling

    def post(self, name: NodeId, when: Time, message: Message) -> None:
        """Deliver `message` to the present life of node `name` at `when`."""
        self._counter += 1
        now = self.now
        heappush(self._heap, (when if when > now else now, self._counter, name, self._lives.get(name, 0), message))

    def call(self, when: Time, action: Callable[[], None]) -> None:
        """Run something of the host itself (a fault, a step's end) at `when`."""
        self._counter += 1
        now = self.now
        heappush(self._heap, (when if when > now else now, self._counter, HOST, 0, action))

    def send(self, source: NodeId, target: NodeId, message: Message) -> None:
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = [self._latency(source, target), 0]
        delays = ON_TIME if self.filter is None else self.filter(source, target, message)
        if not delays:
            self.record(source, MessageDropped(target, type(message).__name__, "lost"))
        for delay in delays:
            due = self.now + link[0] + delay
            if due < link[1]:
                due = link[1]
            link[1] = due
            self._counter += 1
            heappush(self._heap, (due, self._counter, target, self._lives.get(target, 0), message))

    # ------------------------------------------------------------ running

    def run(self, *, until: Time | None = None, max_events: int | None = None, done: Callable[[], bool] | None = None) -> None:
        """Handle events in time order until none is left, `until` is reached, or `done()` holds."""
        left = max_events if max_events is not None else -1
        heap, last = self._heap, until if until is not None else NEVER
        while heap and left != 0:
            if heap[0][0] > last:
                self.now = last
                return
            self.now, _, name, life, what = heappop(heap)
            if name:
                if self._lives.get(name) == life:
                    self.deliver(name, what)  # type: ignore[arg-type]
            else:
                what()  # type: ignore[operator]
            left -= 1
            if self.after_event is not None:
                self.after_event()
            if done is not None and done():
                return

    def deliver(self, name: NodeId, message: Message) -> None:
        """Have node `name` handle `message` now, if it is there: at the end of an action, never while a node is at work."""
        node = self.nodes.get(name)
        if node is not None:
            self.num_events += 1
            if self.keeps_digest:
                self._digest.update(self._encode((self.now, name, message)))
            node.handle(message)

    @property
    def is_idle(self) -> bool:
        return not self._heap

    def digest(self) -> str:
        """A digest over every message handled so far, with its time and receiver (law I9)."""
        return self._digest.hexdigest()

    def record(self, source: NodeId, event: Event) -> None:
        for sink in self.sinks:
            sink(self.now, source, event)


class SimClock:
    """Clock port of one node."""

    def __init__(self, host: SimHost, name: NodeId) -> None:
        self._host = host
        self._name = name

    def now(self) -> Time:
        return self._host.now

    def call_at(self, when: Time, message: Message) -> None:
        self._host.post(self._name, when, message)


class SimTransport:
    """Transport port of one node; a node that was removed sends nothing."""

    def __init__(self, host: SimHost, name: NodeId) -> None:
        self._host = host
        self._name = name

    def send(self, to: NodeId, message: Message) -> None:
        self._host.send(self._name, to, message)


class SimRecorder:
    """Recorder port of one node."""

    def __init__(self, host: SimHost, name: NodeId) -> None:
        self._host = host
        self._name = name

    def record(self, event: Event) -> None:
        self._host.record(self._name, event)
