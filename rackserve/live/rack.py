"""A whole rack on this machine: the control process's side of it, from memory to nodes to rank processes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from types import TracebackType

from rackserve.assemble import RackConfig, build_frontend, build_pool, build_router
from rackserve.base.events import MessageDropped
from rackserve.base.ids import FRONTEND, POOL, ROUTER, SUPERVISOR, NodeId
from rackserve.base.kv_layout import KvLayout
from rackserve.base.topology import ROLES
from rackserve.live.clock import LiveClock
from rackserve.live.host import LiveHost
from rackserve.live.rank_spec import RankSpec, RankStatus
from rackserve.live.recorder import EVENTS_CHANNEL, FanOut, NodeRecorder, Sink
from rackserve.live.regions import RegionOwner
from rackserve.live.runner import RunnerSpec, check_drafts, layout_of, process_bytes, require_packages
from rackserve.live.supervisor import ENGINE_COMMAND, Supervisor, SupervisorConfig
from rackserve.live.transport import CONTROL, LiveTransport, Meeting, Wire
from rackserve.nodes.pool import PoolNode
from rackserve.nodes.ports import Ports
from rackserve.nodes.router import Router
from rackserve.pool.directory import Directory
from rackserve.ports import Node


class LiveRack:
    """`async with LiveRack(config, runner) as rack:` has all ranks up, and leaves no process behind.

    If a node of the control process raises, the task that entered is cancelled and the `async with` ends with that error.

    layout  KV layout of the model, known once entered
    clock   a clock port for code that only reads it; nodes get their own from `ports_for`
    """

    def __init__(
        self,
        config: RackConfig,
        runner: RunnerSpec,
        *,
        sinks: Sequence[Sink] = (),
        supervisor: SupervisorConfig | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
        around_router: Callable[[Node], Node] | None = None,
    ) -> None:
        """`command` starts a rank process; `around_router` may hear what the router is sent. ResourceError if packages lack."""
        require_packages(runner)
        self._config = config
        self._runner = runner
        self._supervision = supervisor or SupervisorConfig()
        self._command = tuple(command)
        self._around_router = around_router
        self._fan_out = FanOut(sinks)
        self._regions = RegionOwner()
        self._pool: PoolNode | None = None
        self._router: Router | None = None
        self._failure: BaseException | None = None
        self._closing = self._entered = False
        self.layout: KvLayout

    async def __aenter__(self) -> LiveRack:
        self._task = asyncio.current_task()
        self.layout = await asyncio.to_thread(layout_of, self._runner)
        self._config.check_layout(self.layout)
        await asyncio.to_thread(check_drafts, self._runner, self._config.scheduler.num_draft)
        loop = asyncio.get_running_loop()
        meeting = Meeting(secrets.token_hex(8), secrets.token_bytes(32))
        template = RankSpec("", "prefill", 0, meeting, (), self.layout, self._runner, self._config)
        self._host = LiveHost(loop, self._on_crash)
        self._wire = Wire(loop, self._host, meeting, CONTROL, 1, template.workers, self._record_drop)
        self._wire.listen(EVENTS_CHANNEL, self._fan_out.take_batch)
        self.clock = LiveClock(self._host, SUPERVISOR)
        self._supervisor = Supervisor(
            loop,
            self._host,
            self._wire,
            self._regions,
            template,
            NodeRecorder(self._fan_out, SUPERVISOR),
            self._supervision,
            self._command,
        )
        self._entered = True
        try:
            self.add_node(FRONTEND, build_frontend(self._config, self.ports_for(FRONTEND)))
            self._router = build_router(self._config, self.layout, self.ports_for(ROUTER))
            self.add_node(ROUTER, self._router if self._around_router is None else self._around_router(self._router))
            if self._config.topology.pool:
                self._pool = build_pool(self._config, self.layout, self.ports_for(POOL))
                self.add_node(POOL, self._pool)
            await self._supervisor.start(await asyncio.to_thread(self._model_bytes))
        except BaseException:
            await self._close()
            self._raise_failure()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()
        self._raise_failure()

    def add_node(self, node_id: NodeId, node: Node) -> None:
        """Let messages to `node_id` reach `node`. Raises InvariantError if the id is taken."""
        self._host.add(node_id, node)

    def ports_for(self, node_id: NodeId) -> Ports:
        """Clock, transport and recorder for a node of the control process."""
        clock, transport = LiveClock(self._host, node_id), LiveTransport(self._wire, node_id)
        return Ports(clock, transport, NodeRecorder(self._fan_out, node_id))

    def transport_for(self, node_id: NodeId) -> LiveTransport:
        return LiveTransport(self._wire, node_id)

    def status(self) -> tuple[RankStatus, ...]:
        """The ranks as the supervisor sees them now; none before it is there."""
        return self._supervisor.status() if self._entered else ()

    @property
    def pool(self) -> Directory | None:
        """The pool's directory, to be read only; None if there is no pool, or not yet."""
        return self._pool.directory if self._pool is not None else None

    @property
    def is_full(self) -> bool:
        """Whether every prefill rank has as much work as it may be given."""
        return self._router is not None and self._router.is_full

    @property
    def pids(self) -> dict[NodeId, int]:
        """Process ids of the workers that run: of the one that leads the worker's devices (see `RankStatus.devices`)."""
        return {rank.worker: rank.pid for rank in self.status() if rank.pid}

    @property
    def dropped(self) -> dict[str, int]:
        """Messages this process lost or refused, by reason."""
        return dict(self._wire.dropped)

    async def drain(self, limit_s: float) -> bool:
        """Take no new requests and wait for the running ones. False if some still run after `limit_s`."""
        return await self._supervisor.drain(limit_s)

    async def _close(self) -> None:
        """End everything. A cancellation meanwhile is put off: leaving half-way would leave processes behind."""
        self._closing = True
        ending = asyncio.ensure_future(self._supervisor.stop())
        cancelled = False
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                cancelled = True
        self._wire.close()
        self._regions.close()
        if cancelled and self._failure is None:
            raise asyncio.CancelledError

    def _model_bytes(self) -> int:
        """What all devices together take besides their KV."""
        topology, total = self._config.topology, 0
        for role in ROLES:
            tp_size, num_ranks = topology.tensor_parallel(role), topology.group_size(role)
            num_devices = len(topology.workers(role)) * num_ranks * tp_size
            total += num_devices * process_bytes(self._runner, tp_size, num_ranks)
        return total

    def _on_crash(self, error: BaseException) -> None:
        self._failure = error
        if self._task is not None and not self._closing:
            self._task.cancel()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            if self._task is not None:
                self._task.uncancel()
            raise self._failure

    def _record_drop(self, to: NodeId, message: str, reason: str) -> None:
        self._fan_out.record(CONTROL, MessageDropped(to, message, reason))
