"""Messages between processes: one ZeroMQ inlet per process, in Linux's abstract socket namespace, and an outlet per peer.

A frame set is [secret, destination, sender process, sender incarnation, payload]. The kernel tells whose process connects, and
those of other users are cut off before a byte of theirs is read: names in that namespace are no secret, and messages may be
large. The secret keeps out other runs of the same user; addresses contain a tag that only its holders can compute, so nobody
can bind a name ahead of a restarted rank.
The destination is a node id, or a channel (`#...`) for what hosts tell each other beside messages.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import zmq

from rackserve.base.ids import NodeId
from rackserve.base.messages import AnyMessage, Message
from rackserve.base.units import MIB
from rackserve.live.host import LiveHost

CONTROL = "control"
"""Name of the process that holds every node but the workers."""

HIGH_WATER_MARK = 4096
"""Messages queued towards, and again at, each process; what comes on top is lost and counted."""

LARGEST_MESSAGE = 64 * MIB

FRAMES_PER_TURN = 256
"""Messages read from the inlet before the loop serves others."""

ChannelReader = Callable[[str, int, bytes], None]
"""Called with (sender process, sender incarnation, payload). Raises msgspec.DecodeError for a payload it cannot read."""

DropRecorder = Callable[[NodeId, str, str], None]
"""Called with (destination, message type, reason) for each message the transport lost."""


class Meeting(msgspec.Struct, frozen=True):
    """What the processes of one run need to find and to trust each other. `secret` has 32 random bytes."""

    run_id: str
    secret: bytes

    def address(self, process: str, incarnation: int) -> str:
        name = f"{self.run_id}-{process}-{incarnation}"
        tag = hmac.digest(self.secret, name.encode(), "sha256").hex()[:16]
        return f"ipc://@rackserve-{name}-{tag}"


class Wire:
    """The sockets of process `process`. `dropped` counts lost messages by reason.

    Messages to a node of this process go straight to its host. A worker's process is named like its node; all other nodes live
    in the control process. Messages of an older incarnation of a peer than the last one known are dropped, and so are messages
    of a peer after `peer_down`: what a dead process left in the sockets must not be taken for news.
    """

    __slots__ = (
        "_channels",
        "_context",
        "_decoder",
        "_descriptor",
        "_encoder",
        "_host",
        "_incarnation",
        "_inlet",
        "_known",
        "_loop",
        "_meeting",
        "_outlets",
        "_peek",
        "_process",
        "_record_drop",
        "_stamp",
        "_workers",
        "dropped",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: LiveHost,
        meeting: Meeting,
        process: str,
        incarnation: int,
        workers: Sequence[NodeId],
        record_drop: DropRecorder,
        peek: Callable[[Message], None] | None = None,
    ) -> None:
        """Bind the inlet and start to read. `peek` sees each message from another process just before its node does."""
        self._loop = loop
        self._host = host
        self._meeting = meeting
        self._process = process
        self._incarnation = incarnation
        self._workers = frozenset(workers)
        self._record_drop = record_drop
        self._peek = peek
        self._channels: dict[str, ChannelReader] = {}
        self._known: dict[str, int] = {}
        self._outlets: dict[str, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(AnyMessage)
        self._stamp = [process.encode(), str(incarnation).encode()]
        self.dropped: Counter[str] = Counter()
        self._context = zmq.Context(io_threads=1)
        self._inlet: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._inlet.set_hwm(HIGH_WATER_MARK)
        self._inlet.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        self._inlet.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._inlet.bind(meeting.address(process, incarnation))
        self._descriptor = int(self._inlet.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._read)
        loop.call_soon(self._read)

    def listen(self, channel: str, reader: ChannelReader) -> None:
        """Give payloads sent to `channel` (a name that begins with `#`) to `reader`."""
        self._channels[channel] = reader

    def peer_up(self, process: str, incarnation: int) -> None:
        """`process` listens as `incarnation` from now on. Older news than what is known changes nothing."""
        if incarnation <= self._known.get(process, 0):
            return
        self._known[process] = incarnation
        outlet: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        outlet.set_hwm(HIGH_WATER_MARK)
        outlet.setsockopt(zmq.LINGER, 0)
        outlet.setsockopt(zmq.RECONNECT_IVL, 10)
        outlet.connect(self._meeting.address(process, incarnation))
        self._close_outlet(process)
        self._outlets[process] = outlet

    def peer_down(self, process: str, incarnation: int) -> None:
        """`process` ended as `incarnation`: nothing is sent to it, or taken from it, until a newer one is up."""
        if incarnation >= self._known.get(process, 0):
            self._known[process] = incarnation
            self._close_outlet(process)

    def send(self, source: NodeId, to: NodeId, message: Message) -> None:
        """Send from node `source` of this process to node `to`. Never blocks; a loss is counted and recorded."""
        if self._host.has(to):
            if not self._host.post(to, message):
                self._drop(to, type(message).__name__, f"the inbox is full; sent by {source}")
            return
        process = to if to in self._workers else CONTROL
        problem = "unknown node" if process == self._process else self._push(process, to, self._encoder.encode(message))
        if problem:
            self._drop(to, type(message).__name__, problem)

    def send_raw(self, process: str, channel: str, payload: bytes) -> bool:
        """Send `payload` to a channel of another process. False: it was lost."""
        problem = self._push(process, channel, payload)
        if problem:
            self.dropped[problem] += 1
        return not problem

    def close(self, linger_ms: int = 0) -> None:
        """Close all sockets; wait up to `linger_ms` for messages under way."""
        self._loop.remove_reader(self._descriptor)
        self._inlet.close(0)
        for outlet in self._outlets.values():
            outlet.close(linger_ms)
        self._outlets.clear()
        self._context.term()

    def _push(self, process: str, to: str, payload: bytes) -> str:
        """Hand a frame set to the outlet of `process`; the reason if that cannot be done, else an empty text."""
        outlet = self._outlets.get(process)
        if outlet is None:
            return "the process is not up"
        if len(payload) > LARGEST_MESSAGE:
            return "the message is too large"
        try:
            outlet.send_multipart([self._meeting.secret, to.encode(), *self._stamp, payload], zmq.NOBLOCK)
        except zmq.Again:
            return "the outlet is full"
        return ""

    def _close_outlet(self, process: str) -> None:
        outlet = self._outlets.pop(process, None)
        if outlet is not None:
            outlet.close(0)

    def _drop(self, to: NodeId, message: str, reason: str) -> None:
        self.dropped[reason] += 1
        self._record_drop(to, message, reason)

    def _read(self) -> None:
        """Read what is there. The descriptor signals changes only, so reading goes on until nothing is left."""
        if self._inlet.closed:
            return
        try:
            for _ in range(FRAMES_PER_TURN):
                self._accept(self._inlet.recv_multipart(zmq.NOBLOCK))
            self._loop.call_soon(self._read)
        except zmq.Again:
            pass
        except Exception as error:
            self._host.crash(error)
        self._host.deliver()

    def _accept(self, frames: list[bytes]) -> None:
        if not frames or not hmac.compare_digest(frames[0], self._meeting.secret):
            self.dropped["wrong secret"] += 1  # counted only: a stranger must not be able to fill the event log
            return
        try:
            _, to, sender, incarnation_text, payload = frames
            destination, process, incarnation = to.decode(), sender.decode(), int(incarnation_text)
            what = self._channels[destination] if destination.startswith("#") else self._decoder.decode(payload)
        except (ValueError, LookupError, msgspec.DecodeError) as error:
            self._drop("?", "?", f"undecodable: {type(error).__name__}")
            return
        if isinstance(what, Message):
            self._admit(destination, process, incarnation, what)
        else:
            self._give(what, process, incarnation, payload)

    def _give(self, reader: ChannelReader, process: str, incarnation: int, payload: bytes) -> None:
        """Only what `reader` cannot decode is a loss; any other error it raises is a bug and must show."""
        try:
            reader(process, incarnation, payload)
        except msgspec.DecodeError as error:
            self._drop("?", "?", f"undecodable: {type(error).__name__}")

    def _admit(self, to: NodeId, process: str, incarnation: int, message: Message) -> None:
        known = self._known.get(process, 0)
        kind = type(message).__name__
        if incarnation < known or (incarnation == known and process not in self._outlets):
            self._drop(to, kind, f"sent by {process}, which is down")
            return
        if incarnation > known:
            self.peer_up(process, incarnation)  # it may speak to us before we hear that it is up
        if self._peek:
            self._peek(message)
        if not self._host.post(to, message):
            self._drop(to, kind, "the inbox is full" if self._host.has(to) else "unknown node")


class LiveTransport:
    """Transport port of one node."""

    __slots__ = ("_node", "_wire")

    def __init__(self, wire: Wire, node: NodeId) -> None:
        self._wire = wire
        self._node = node

    def send(self, to: NodeId, message: Message) -> None:
        self._wire.send(self._node, to, message)
