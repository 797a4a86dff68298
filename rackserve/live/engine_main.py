"""A rank process: one worker node with its engine and store, started as `python -m rackserve.live.engine_main`.

It is device 0 of its worker and leads the others, if there are any. It ends with the control process in any case: the kernel
kills it when its parent dies, and a thread leaves at the end of the standard input. Exit codes: 0 asked to stop or control
process gone, 70 a handler raised or a device of the worker was lost, others those of errors a person can mend (text on stderr).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import msgspec

from rackserve.assemble import build_worker
from rackserve.base.errors import RackserveError
from rackserve.base.events import MessageDropped
from rackserve.base.ids import NodeId
from rackserve.base.messages import Message, RankDown, RankUp
from rackserve.live.clock import LiveClock
from rackserve.live.engine import ThreadEngine
from rackserve.live.group import Group
from rackserve.live.host import LiveHost
from rackserve.live.launch import CRASHED, end_with_parent
from rackserve.live.rank_spec import BEAT_CHANNEL, BEAT_PERIOD_S, READY_CHANNEL, REGIONS_CHANNEL, Beat, KvUse, RankSpec
from rackserve.live.recorder import BatchRecorder
from rackserve.live.regions import RegionFile
from rackserve.live.store import SharedStore
from rackserve.live.transport import CONTROL, LiveTransport, Wire
from rackserve.nodes.decode import DecodeNode
from rackserve.nodes.ports import Ports
from rackserve.nodes.prefill import PrefillNode
from rackserve.ports import Node

BuildNode = Callable[[RankSpec, Ports], Node]

LINGER_MS = 200


def build_from_config(spec: RankSpec, ports: Ports) -> Node:
    """The worker node that the rack's configuration describes."""
    return build_worker(spec.config, spec.worker, spec.role, spec.layout, ports, spec.incarnation)


def main(build: BuildNode = build_from_config) -> None:
    """Be the rank process that the first line of standard input describes. Does not return before the end of the process."""
    end_with_parent()
    line = _read_line()
    threading.Thread(target=_leave_with_parent, name="parent", daemon=True).start()
    sys.setswitchinterval(1e-3)  # the loop must get its turn while the engine thread computes in Python
    try:
        spec = msgspec.json.decode(line, type=RankSpec)
        group = _open_group(spec)
        asyncio.run(_serve(spec, group, build))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(CRASHED)
    os._exit(0)  # the engine thread may be busy for long; nobody waits for its result


def _open_group(spec: RankSpec) -> Group:
    """The model over the arenas of all ranks. An error a person can mend ends the process with its text and exit code."""
    try:
        return Group(spec)
    except RackserveError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def _read_line() -> bytes:
    """The first line of standard input, unbuffered. Empty or cut short if the parent is gone."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            os._exit(0)
        line += chunk
    return line


def _leave_with_parent() -> None:
    while os.read(0, 1 << 10):
        pass
    os._exit(0)


def kv_use(node: Node) -> tuple[KvUse, ...]:
    """What the KV blocks of each of a worker's ranks are doing; nothing of a node that is none."""
    caches = node.worker.caches if isinstance(node, PrefillNode | DecodeNode) else []
    return tuple(KvUse(cache.num_blocks - cache.usable, cache.num_cached, cache.num_blocks) for cache in caches)


class _Peers:
    """Follows what the control process says about other processes and about memory, ahead of the node."""

    __slots__ = ("_decoder", "_store", "wire")

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._decoder = msgspec.msgpack.Decoder(tuple[RegionFile, ...])
        self.wire: Wire | None = None

    def see(self, message: Message) -> None:
        if self.wire is None:
            return
        if isinstance(message, RankUp):
            self.wire.peer_up(message.rank.worker, message.incarnation)
        elif isinstance(message, RankDown):
            self.wire.peer_down(message.rank.worker, message.incarnation)

    def take_regions(self, process: str, incarnation: int, payload: bytes) -> None:
        self._store.set_regions(self._decoder.decode(payload))


async def _serve(spec: RankSpec, group: Group, build: BuildNode) -> None:
    """Run the node until SIGTERM. Raises what a handler raised."""
    loop = asyncio.get_running_loop()
    end: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None = None) -> None:
        if not end.done():
            end.set_result(None) if error is None else end.set_exception(error)

    host = LiveHost(loop, finish)
    store = SharedStore(host, spec.worker)
    store.set_regions(spec.regions)
    engine = ThreadEngine(host, spec.worker, spec.num_ranks, group)
    peers = _Peers(store)

    def record_drop(to: NodeId, message: str, reason: str) -> None:
        recorder.record(MessageDropped(to, message, reason))

    wire = Wire(loop, host, spec.meeting, spec.worker, spec.incarnation, spec.workers, record_drop, peers.see)
    recorder = BatchRecorder(loop, wire, spec.worker)
    peers.wire = wire
    wire.listen(REGIONS_CHANNEL, peers.take_regions)
    wire.peer_up(CONTROL, 1)
    ports = Ports(LiveClock(host, spec.worker), LiveTransport(wire, spec.worker), recorder, store, engine)
    node = build(spec, ports)
    host.add(spec.worker, node)
    if isinstance(node, PrefillNode | DecodeNode):
        engine.has_requests = node.worker.has_requests
    loop.add_signal_handler(signal.SIGTERM, finish)

    def beat() -> None:
        sign = Beat(engine.steps_done, engine.step_started_ns, kv_use(node), engine.times())
        wire.send_raw(CONTROL, BEAT_CHANNEL, msgspec.msgpack.encode(sign))
        loop.call_later(BEAT_PERIOD_S, beat)

    wire.send_raw(CONTROL, READY_CHANNEL, msgspec.msgpack.encode(group.ready))
    beat()
    try:
        await end
    finally:
        recorder.flush()
        wire.close(LINGER_MS)


if __name__ == "__main__":
    main()
