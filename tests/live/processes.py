"""What the tests of the live host share: bounded waiting, tiny nodes, and racks of tiny ranks."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rackserve.assemble import RackConfig
from rackserve.base.events import Event
from rackserve.base.messages import Cancel, Message
from rackserve.base.topology import Topology
from rackserve.digest_model import digest_layout
from rackserve.live.host import LiveHost
from rackserve.live.rank_spec import RankSpec
from rackserve.live.regions import RegionOwner
from rackserve.live.runner import RunnerSpec
from rackserve.live.supervisor import Supervisor, SupervisorConfig
from rackserve.live.transport import CONTROL, Meeting, Wire

TINY_RANK = (sys.executable, "-m", "tests.live.tiny_rank")
SMALL = Topology(prefill_workers=1, decode_workers=1, prefill_blocks=4, decode_blocks=4, segment_blocks=4)


async def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    """Let the loop run until `condition` holds; fails after `limit_s`."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.002)


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or a zombie nobody has reaped yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def new_meeting() -> Meeting:
    return Meeting(secrets.token_hex(8), secrets.token_bytes(32))


@dataclass(slots=True)
class Listener:
    """A node, a recorder and a drop recorder that keep what they get."""

    messages: list[Message] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    drops: list[tuple[str, str, str]] = field(default_factory=list)

    def handle(self, message: Message) -> None:
        self.messages.append(message)

    def record(self, event: Event) -> None:
        self.events.append(event)

    def record_drop(self, to: str, message: str, reason: str) -> None:
        self.drops.append((to, message, reason))

    @property
    def texts(self) -> list[str]:
        """Texts of the `Cancel` messages, which the tiny nodes use as a plain envelope."""
        return [message.request for message in self.messages if isinstance(message, Cancel)]


@dataclass(slots=True)
class TinyRack:
    """A control process whose router, frontend, pool and api are one `Listener` each."""

    supervisor: Supervisor
    wire: Wire
    nodes: dict[str, Listener]
    errors: list[BaseException]
    regions: RegionOwner

    def tell(self, worker: str, text: str) -> None:
        self.wire.send("api", worker, Cancel(text))

    def pid(self, worker: str) -> int:
        return next(status.pid for status in self.supervisor.status() if status.worker == worker)

    def state(self, worker: str) -> str:
        return next(status.state for status in self.supervisor.status() if status.worker == worker)


@asynccontextmanager
async def tiny_rack(
    topology: Topology = SMALL, config: SupervisorConfig | None = None, command: Sequence[str] = TINY_RANK, start: bool = True
) -> AsyncIterator[TinyRack]:
    loop = asyncio.get_running_loop()
    errors: list[BaseException] = []
    meeting = new_meeting()
    host = LiveHost(loop, errors.append)
    nodes = {name: Listener() for name in ("router", "frontend", "pool", "api")}
    template = RankSpec(
        "", "prefill", 0, meeting, (), digest_layout(4), RunnerSpec(block_tokens=4), RackConfig(topology=topology)
    )
    wire = Wire(loop, host, meeting, CONTROL, 1, template.workers, nodes["api"].record_drop)
    for name, node in nodes.items():
        host.add(name, node)
    regions = RegionOwner()
    supervisor = Supervisor(loop, host, wire, regions, template, nodes["api"], config or SupervisorConfig(), command)
    try:
        if start:
            await supervisor.start(0)
        yield TinyRack(supervisor, wire, nodes, errors, regions)
    finally:
        await supervisor.stop()
        wire.close()
        regions.close()


def open_memfds() -> list[str]:
    """Names of the anonymous memory files this process holds or maps."""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:rackserve" in line]
    return [name for name in links if "/memfd:rackserve" in name] + mapped
