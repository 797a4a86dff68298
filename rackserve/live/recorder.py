"""Recorded events on their way from every process to the sinks of the control process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from rackserve.base.events import AnyEvent, Event, MessageDropped
from rackserve.base.ids import NodeId
from rackserve.base.units import Time
from rackserve.live.transport import CONTROL, Wire

log = logging.getLogger(__name__)

EVENTS_CHANNEL = "#events"
BATCH = 200
BUFFER_LIMIT = 20_000
"""Events a rank process keeps when it cannot send; what comes on top is lost and counted."""

PERIOD_S = 0.1
FLUSH_LINES = 200


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """An event, the monotonic time at which `node` recorded it, and that node."""

    t: Time
    node: NodeId
    event: AnyEvent


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one rank process in order; `num_lost` were lost before them."""

    num_lost: int
    events: tuple[Recorded, ...]


Sink = Callable[[Recorded], None]
"""Takes each recorded event of the rack, in the control process."""


class BatchRecorder:
    """Recorder port of a rank process: sends a batch to the control process every PERIOD_S or BATCH events."""

    __slots__ = ("_buffer", "_encoder", "_loop", "_node", "_num_lost", "_timer", "_wire")

    def __init__(self, loop: asyncio.AbstractEventLoop, wire: Wire, node: NodeId) -> None:
        self._loop = loop
        self._wire = wire
        self._node = node
        self._buffer: list[Recorded] = []
        self._num_lost = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._timer: asyncio.TimerHandle | None = None

    def record(self, event: Event) -> None:
        if len(self._buffer) >= BUFFER_LIMIT:
            self._num_lost += 1
            return
        self._buffer.append(Recorded(time.monotonic_ns(), self._node, event))  # type: ignore[arg-type]  # the union of all events
        if len(self._buffer) % BATCH == 0:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(PERIOD_S, self.flush)

    def flush(self) -> None:
        """Send what is buffered; keep it if the wire is full."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._buffer and not self._num_lost:
            return
        batch = EventBatch(self._num_lost, tuple(self._buffer))
        if self._wire.send_raw(CONTROL, EVENTS_CHANNEL, self._encoder.encode(batch)):
            self._buffer.clear()
            self._num_lost = 0
        else:
            self._timer = self._loop.call_later(PERIOD_S, self.flush)


class FanOut:
    """Where all events of the rack meet: gives each to every sink, in the order of arrival."""

    __slots__ = ("_decoder", "_sinks")

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._decoder = msgspec.msgpack.Decoder(EventBatch)

    def record(self, node: NodeId, event: Event) -> None:
        """Record an event of a node of this process."""
        recorded = Recorded(time.monotonic_ns(), node, event)  # type: ignore[arg-type]  # the union of all events
        for sink in self._sinks:
            sink(recorded)

    def take_batch(self, process: str, incarnation: int, payload: bytes) -> None:
        """Channel reader for batches of rank processes. Raises msgspec.DecodeError."""
        batch = self._decoder.decode(payload)
        if batch.num_lost:
            self.record(process, MessageDropped(process, "Event", f"{batch.num_lost} events: the recorder was full"))
        for recorded in batch.events:
            for sink in self._sinks:
                sink(recorded)


class NodeRecorder:
    """Recorder port of one node of the control process."""

    __slots__ = ("_fan_out", "_node")

    def __init__(self, fan_out: FanOut, node: NodeId) -> None:
        self._fan_out = fan_out
        self._node = node

    def record(self, event: Event) -> None:
        self._fan_out.record(self._node, event)


class JsonlFile:
    """A sink that writes one line per event: {"t": nanoseconds, "node": ..., "type": event name, fields of the event}."""

    __slots__ = ("_encoder", "_file", "_path", "_unflushed")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = path.open("wb")
        self._encoder = msgspec.json.Encoder()
        self._unflushed = 0

    def __call__(self, recorded: Recorded) -> None:
        """Write one event. When the disk is full, say so once and write no more: serving goes on."""
        if self._file is None:
            return
        head = self._encoder.encode({"t": recorded.t, "node": recorded.node})
        try:
            self._file.write(head[:-1] + b"," + self._encoder.encode(recorded.event)[1:] + b"\n")
            self._unflushed += 1
            if self._unflushed >= FLUSH_LINES:
                self._file.flush()
                self._unflushed = 0
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.error("%s: %s; no more events are written there", self._path, error.strerror)
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()
