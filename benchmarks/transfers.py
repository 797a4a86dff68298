"""Moving KV and messages between processes: the live store beside one memmove, the live wire beside a bare socket."""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns, process_time_ns

from measure import CPU_TIME, Options, Result, at_most, figure, interleave, main

from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.messages import Cancel, Message, TransferFinished
from rackserve.base.transfer import Copy, Transfer
from rackserve.live.host import LiveHost
from rackserve.live.regions import RegionOwner, RegionShape, map_region
from rackserve.live.store import SharedStore
from rackserve.live.transport import CONTROL, Meeting, Wire

BLOCK_BYTES = 368_640
NUM_BLOCKS = 96
RANK = "prefill0"
PAYLOAD = 256
LIMIT_S = 20.0


class Inbox:
    """A node that wakes whoever waits for its next message."""

    def __init__(self) -> None:
        self.message: asyncio.Future[Message] | None = None

    def handle(self, message: Message) -> None:
        if self.message is not None and not self.message.done():
            self.message.set_result(message)

    async def next(self, start: Callable[[], None]) -> Message:
        self.message = asyncio.get_running_loop().create_future()
        start()
        return await asyncio.wait_for(self.message, LIMIT_S)


def stop_on(error: BaseException) -> None:
    raise error


class StoreBench:
    """Two regions of shared memory and the store of a rank, on a loop of its own."""

    def __init__(self, num_blocks: int) -> None:
        self.loop = asyncio.new_event_loop()
        self._owner, self._inbox = RegionOwner(), Inbox()
        self._num_blocks, self._number = num_blocks, 0
        shape = RegionShape.of(KvLayout(16, (KvGroup("kv", "full", BLOCK_BYTES),)), 2 * num_blocks, 0)
        self._maps = [map_region(self._owner.create(name, shape)) for name in ("a", "b")]
        for mapped in self._maps:
            ctypes.memset(mapped.address, 7, shape.num_bytes)
        host = LiveHost(self.loop, stop_on)
        host.add(RANK, self._inbox)
        self._store = SharedStore(host, RANK)
        self._store.set_regions(self._owner.table())

    def copy(self, stride: int) -> float:
        """CPU nanoseconds to copy the blocks whose slots lie `stride` apart, from start to the message of its end."""
        self._number += 1
        slots = tuple(range(0, self._num_blocks * stride, stride))
        transfer = Transfer(self._number, "push", (Copy("a", "b", "full", slots, slots),))
        begin = process_time_ns()
        ended = self.loop.run_until_complete(self._inbox.next(lambda: self._store.start(transfer)))
        spent = process_time_ns() - begin
        assert isinstance(ended, TransferFinished), f"the copy did not finish: {ended}"
        return spent

    def memmove(self) -> float:
        """CPU nanoseconds to move as many bytes in one piece."""
        source, target = self._maps
        begin = process_time_ns()
        ctypes.memmove(target.address, source.address, self._num_blocks * BLOCK_BYTES)
        return process_time_ns() - begin

    def close(self) -> None:
        self._store.close()
        for mapped in self._maps:
            mapped.close()
        self._owner.close()
        self.loop.close()


class WireBench:
    """Control process and a rank process that sends every message back; and a bare socket to a process that does the same."""

    def __init__(self, calls: int) -> None:
        self.loop = asyncio.new_event_loop()
        self._calls, self._inbox = calls, Inbox()
        meeting = Meeting(secrets.token_hex(8), secrets.token_bytes(32))
        host = LiveHost(self.loop, stop_on)
        host.add("router", self._inbox)
        self._wire = Wire(self.loop, host, meeting, CONTROL, 1, (RANK,), lambda to, kind, why: None)
        self._wire.peer_up(RANK, 1)
        here, there = socket.socketpair()
        self._socket = here
        here.settimeout(LIMIT_S)
        words = [meeting.run_id, meeting.secret.hex(), str(there.fileno())]
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, f"--echo-{kind}", *words], pass_fds=[there.fileno()], stdin=subprocess.PIPE
            )
            for kind in ("wire", "socket")
        ]
        there.close()
        self.round_trip_socket()
        self.loop.run_until_complete(self._first())

    async def _first(self) -> None:
        """The first message may be sent before the rank listens, and is then delivered late; wait for it once."""
        await self._inbox.next(lambda: self._wire.send("router", RANK, Cancel("hello")))

    def round_trip_wire(self) -> float:
        """Nanoseconds of a message to a node of the rank process and back."""
        message = Cancel("x" * PAYLOAD)

        async def go() -> float:
            begin = perf_counter_ns()
            for _ in range(self._calls):
                await self._inbox.next(lambda: self._wire.send("router", RANK, message))
            return (perf_counter_ns() - begin) / self._calls

        return self.loop.run_until_complete(go())

    def round_trip_socket(self) -> float:
        """Nanoseconds of as many bytes over a socket pair and back."""
        begin = perf_counter_ns()
        for _ in range(self._calls):
            self._socket.sendall(b"x" * PAYLOAD)
            left = PAYLOAD
            while left:
                left -= len(self._socket.recv(left))
        return (perf_counter_ns() - begin) / self._calls

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._wire.close()
        self._socket.close()
        self.loop.close()


def echo_wire(run_id: str, secret: str) -> None:
    """A rank process that sends each message back to the router, until its standard input ends."""
    loop = asyncio.new_event_loop()
    host = LiveHost(loop, stop_on)
    wire = Wire(loop, host, Meeting(run_id, bytes.fromhex(secret)), RANK, 1, (RANK,), lambda to, kind, why: None)

    class Back:
        def handle(self, message: Message) -> None:
            wire.send(RANK, "router", message)

    host.add(RANK, Back())
    wire.peer_up(CONTROL, 1)
    loop.add_reader(sys.stdin.fileno(), loop.stop)
    loop.run_forever()
    wire.close()


def echo_socket(descriptor: str) -> None:
    """Send back what comes, until the other end closes."""
    peer = socket.socket(fileno=int(descriptor))
    while data := peer.recv(4096):
        peer.sendall(data)


def run(options: Options) -> Result:
    num_blocks, calls = (8, 20) if options.quick else (NUM_BLOCKS, 300)
    store = StoreBench(num_blocks)
    try:
        copies = interleave(
            {"one run": partial(store.copy, 1), "scattered": partial(store.copy, 2), "memmove": store.memmove}, options.rounds
        )
    finally:
        store.close()
    wire = WireBench(calls)
    try:
        trips = interleave({"wire": wire.round_trip_wire, "socket": wire.round_trip_socket}, options.rounds)
    finally:
        wire.close()
    size = num_blocks * BLOCK_BYTES
    what, whole = f"store: {num_blocks} blocks of {BLOCK_BYTES:,} bytes", "one memmove of as many bytes"
    rate = tuple(size / value for value in copies["memmove"])
    figures = (
        figure(f"{what}, consecutive slots", "ms", copies["one run"], whole, copies["memmove"], 1e-6),
        figure(f"{what}, every second slot", "ms", copies["scattered"], whole, copies["memmove"], 1e-6),
        figure("memmove in one piece", "GB/s", rate),
        figure("message to a rank process and back", "µs", trips["wire"], "a bare socket pair", trips["socket"], 1e-3),
        figure("bare socket pair to a process and back", "µs", trips["socket"], scale=1e-3),
    )
    claims = (
        at_most("copying consecutive blocks takes at most 1.5 times as long as one memmove", figures[0].ratios, 1.5),
        at_most("copying scattered blocks takes at most 1.5 times as long as one memmove", figures[1].ratios, 1.5),
        at_most("a message takes at most 10 times as long as over a bare socket", figures[3].ratios, 10),
    )
    notes = (
        f"Messages of {PAYLOAD} bytes, one at a time. The wire goes through ZeroMQ, two event loops, encoding and decoding; "
        "the socket through nothing. On a busy machine both wait for a core.",
    )
    question = "What do the live store and the live wire add to moving the bytes?"
    return Result(
        "transfers", question, f"copies: {CPU_TIME}, copier thread included; messages: wall time", claims, figures, notes
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--echo-wire"]:
        echo_wire(sys.argv[2], sys.argv[3])
    elif sys.argv[1:2] == ["--echo-socket"]:
        echo_socket(sys.argv[4])
    else:
        raise SystemExit(main(run, __doc__))
