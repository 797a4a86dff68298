"""A whole rack on the simulated host: production nodes over modelled engines, stores and links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rackserve.assemble import RackConfig, build_frontend, build_pool, build_router, build_worker
from rackserve.base.errors import InvariantError
from rackserve.base.ids import FRONTEND, POOL, ROUTER, SUPERVISOR, NodeId, Rank
from rackserve.base.kv_layout import KvLayout
from rackserve.base.messages import Message, RankDown, RankUp, SegmentJoined, SegmentLost
from rackserve.base.topology import ROLES, Role
from rackserve.base.transfer import Region, arena_region, segment_region
from rackserve.base.units import NS_PER_US, Time
from rackserve.nodes.decode import DecodeNode
from rackserve.nodes.frontend import Frontend
from rackserve.nodes.pool import PoolNode
from rackserve.nodes.ports import Ports
from rackserve.nodes.prefill import PrefillNode
from rackserve.nodes.router import Router
from rackserve.ports import Node
from rackserve.sim.engine import PassTime, Runner, SimEngine
from rackserve.sim.host import SimClock, SimHost, SimRecorder, SimTransport
from rackserve.sim.store import LinkCost, SimRegions, SimStore

RunnerMaker = Callable[[memoryview, int], Runner]
"""(arena, num_blocks) -> runner of one rank."""


@dataclass(slots=True)
class WorkerSite:
    """A worker process of the simulation: its role, incarnation, parts, and its tray's pool segment (-1: none)."""

    role: Role
    incarnation: int = 0
    node: PrefillNode | DecodeNode | None = None
    engine: SimEngine | None = None
    store: SimStore | None = None
    segment: int = -1
    regions: tuple[Region, ...] = ()


class SimRack:
    """Builds and runs the nodes of `config`. `step_time` models each role's steps, by rank or group; `link` every transfer."""

    def __init__(
        self,
        config: RackConfig,
        layout: KvLayout,
        make_runner: RunnerMaker,
        step_time: Mapping[Role, PassTime],
        link: LinkCost,
        *,
        backed: bool,
        latency_ns: Time = 50 * NS_PER_US,
    ) -> None:
        control = {FRONTEND, ROUTER, POOL}

        def latency(source: NodeId, target: NodeId) -> Time:
            return 0 if source in control and target in control else latency_ns

        self.host = SimHost(latency)
        self.config = config
        self.layout = layout
        self.regions = SimRegions(layout, backed=backed)
        self._make_runner = make_runner
        self._step_time = step_time
        self._link = link
        self._num_segments = 0
        self.frontend: Frontend = build_frontend(config, self._ports(FRONTEND))
        self.router: Router = build_router(config, layout, self._ports(ROUTER))
        self.pool: PoolNode | None = build_pool(config, layout, self._ports(POOL)) if config.topology.pool else None
        self.host.add(FRONTEND, self.frontend)
        self.host.add(ROUTER, self.router)
        if self.pool is not None:
            self.host.add(POOL, self.pool)
        self.sites = {worker: WorkerSite(role) for role in ROLES for worker in config.topology.workers(role)}
        for worker in self.sites:
            self.start(worker)

    def _ports(self, name: NodeId, store: SimStore | None = None, engine: SimEngine | None = None) -> Ports:
        host = self.host
        return Ports(SimClock(host, name), SimTransport(host, name), SimRecorder(host, name), store, engine)

    def add_node(self, name: NodeId, make: Callable[[Ports], Node]) -> None:
        """A node of the caller's, such as a client."""
        self.host.add(name, make(self._ports(name)))

    # ------------------------------------------------------------ workers come and go

    def ranks_of(self, worker: NodeId) -> list[Rank]:
        return [Rank(worker, index) for index in range(self.config.topology.group_size(self.sites[worker].role))]

    def start(self, worker: NodeId) -> None:
        """A worker starts (again) with empty caches, fresh memory and an empty pool segment."""
        site, topology = self.sites[worker], self.config.topology
        site.incarnation += 1
        num_blocks = topology.num_blocks(site.role)
        ranks = self.ranks_of(worker)
        site.regions = tuple(arena_region(rank, site.incarnation) for rank in ranks)
        arenas = [self.regions.create(name, num_blocks, topology.rank_windows) for name in site.regions]
        runners = [self._make_runner(arena, num_blocks) for arena in arenas]
        site.engine = SimEngine(self.host, worker, runners, self._step_time[site.role], self.config.scheduler)
        site.store = SimStore(self.host, worker, self.regions, self._link)
        ports = self._ports(worker, site.store, site.engine)
        site.node = build_worker(self.config, worker, site.role, self.layout, ports, site.incarnation)
        self.host.add(worker, site.node)
        for rank in ranks:
            self.broadcast(RankUp(rank, site.role, site.incarnation))
        if self.pool is not None:
            self.join_segment(worker)

    def join_segment(self, worker: NodeId) -> None:
        """The worker's tray gives an empty segment to the pool, under a number never used before."""
        site, topology = self.sites[worker], self.config.topology
        site.segment = self._num_segments
        self._num_segments += 1
        self.regions.create(segment_region(site.segment), topology.segment_blocks, topology.segment_windows)
        joined = SegmentJoined(site.segment, topology.segment_blocks, topology.segment_windows, Rank(worker, 0))
        self.host.send(SUPERVISOR, POOL, joined)

    def lose_segment(self, worker: NodeId) -> None:
        """The tray's pool memory is gone; the worker lives on."""
        site = self.sites[worker]
        if site.segment >= 0:
            self.regions.remove(segment_region(site.segment))
            self.host.send(SUPERVISOR, POOL, SegmentLost(site.segment))
            site.segment = -1

    def kill(self, worker: NodeId, *, noticed_after: Time) -> None:
        """The process dies now; everyone learns of it `noticed_after` later."""
        site = self.sites[worker]
        if site.node is None:
            raise InvariantError(f"{worker} is dead already")
        self.host.remove(worker)
        site.node = site.engine = site.store = None
        for name in site.regions:
            self.regions.remove(name)
        if site.segment >= 0:
            self.regions.remove(segment_region(site.segment))
        incarnation, segment = site.incarnation, site.segment
        site.segment = -1

        def notice() -> None:
            for rank in self.ranks_of(worker):
                self.broadcast(RankDown(rank, incarnation))
            if segment >= 0:
                self.host.send(SUPERVISOR, POOL, SegmentLost(segment))

        self.host.call(self.host.now + noticed_after, notice)

    def broadcast(self, message: Message) -> None:
        """A supervision message to router, pool and every live worker."""
        for name in (ROUTER, POOL, *self.sites):
            if name in self.host.nodes:
                self.host.send(SUPERVISOR, name, message)

    # ------------------------------------------------------------ laws

    def workers(self) -> dict[NodeId, PrefillNode | DecodeNode]:
        """The nodes of live workers."""
        return {name: site.node for name, site in self.sites.items() if site.node is not None}
