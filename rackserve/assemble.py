"""From configuration to nodes: what both hosts build, and nothing host-specific."""

from __future__ import annotations

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.ids import NodeId
from rackserve.base.kv_layout import KvLayout
from rackserve.base.ranges import MAX_COUNT, MAX_RATE, MAX_SECONDS, MIN_RATE, MIN_SECONDS, require_range
from rackserve.base.topology import Role, Topology
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.decode import DecodeNode
from rackserve.nodes.frontend import Frontend, FrontendConfig
from rackserve.nodes.pool import PoolNode
from rackserve.nodes.ports import Ports
from rackserve.nodes.prefill import PrefillNode
from rackserve.nodes.router import Capacity, Router
from rackserve.nodes.worker import Owner, Worker
from rackserve.pool.directory import PoolConfig
from rackserve.pool.planner import FetchRates
from rackserve.route.placement import MAX_FETCH_COST, RouterConfig
from rackserve.runs.accounts import TenantsConfig
from rackserve.sched.scheduler import SchedulerConfig


class RatesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured rates that decide between fetching and computing: see `rackserve.pool.planner.FetchRates`."""

    prefill_tokens_per_s: float = 300.0
    fetch_bytes_per_s: float = 1e9
    fetch_latency_s: float = 0.002

    def __post_init__(self) -> None:
        require_range("rates", self, ("prefill_tokens_per_s", "fetch_bytes_per_s"), MIN_RATE, MAX_RATE)
        require_range("rates", self, ("fetch_latency_s",), 0, MAX_SECONDS)

    def fetch_cost(self, layout: KvLayout) -> float:
        """Time to fetch a token of this layout over time to compute it."""
        cost = layout.block_bytes / layout.block_tokens / self.fetch_bytes_per_s * self.prefill_tokens_per_s
        return min(cost, MAX_FETCH_COST)


class RackConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides how a rack behaves, on either host."""

    topology: Topology = Topology()
    frontend: FrontendConfig = FrontendConfig()
    router: RouterConfig = RouterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    pool: PoolConfig = PoolConfig()
    rates: RatesConfig = RatesConfig()
    tenants: TenantsConfig = TenantsConfig()
    deadlines: Deadlines = Deadlines()

    def __post_init__(self) -> None:
        require_range("deadlines", self.deadlines, Deadlines.__struct_fields__, MIN_SECONDS, MAX_SECONDS)
        require_range("frontend", self.frontend, FrontendConfig.__struct_fields__, 1, MAX_COUNT)
        needed = 2 * (self.deadlines.ns("lookup") + self.deadlines.ns("transfer"))  # twice: a cancelled transfer takes a while
        if self.topology.pool and needed > self.pool.lease_ns:
            raise ConfigError(
                f"pool.lease_ns ({self.pool.lease_ns}) must be at least twice deadlines.lookup + deadlines.transfer, "
                f"that is {needed}: a lease of the pool that ends first lets slots be reused under a transfer"
            )

    def check_layout(self, layout: KvLayout) -> None:
        """Raise ConfigError if the topology cannot serve a model with this layout."""
        topology = self.topology
        if not layout.has_window:
            return
        if not layout.stores_state and topology.rank_windows < 1:
            raise ConfigError("topology.rank_windows must be at least 1: a sequence hands over one state of this model")
        if layout.stores_state and topology.rank_windows < 3:
            raise ConfigError(
                "topology.rank_windows must be at least 3: a sequence resumes from one state of this model and stores two"
            )
        if topology.pool and layout.stores_state and topology.segment_windows < 1:
            raise ConfigError("topology.segment_windows must be at least 1: this model keeps resume state in the pool")


def build_frontend(config: RackConfig, ports: Ports) -> Frontend:
    return Frontend(config.frontend, config.deadlines, ports)


def build_router(config: RackConfig, layout: KvLayout, ports: Ports) -> Router:
    topology, block_tokens = config.topology, layout.block_tokens
    given = config.router.fetch_cost
    capacity = Capacity(
        topology.prefill_blocks * block_tokens,
        topology.decode_blocks * block_tokens,
        block_tokens,
        config.rates.fetch_cost(layout) if given is None else given,
        layout.replay_tokens,
    )
    return Router(config.router, capacity, config.deadlines, ports)


def build_pool(config: RackConfig, layout: KvLayout, ports: Ports) -> PoolNode:
    return PoolNode(config.pool, layout, ports, config.tenants)


def build_worker(
    config: RackConfig, worker: NodeId, role: Role, layout: KvLayout, ports: Ports, incarnation: int
) -> PrefillNode | DecodeNode:
    """The node of one worker; `incarnation` names its arenas, so that a restarted one gets fresh memory."""
    config.check_layout(layout)
    topology = config.topology

    def parts(owner: Owner) -> Worker:
        return Worker(
            worker,
            topology.group_size(role),
            topology.num_blocks(role),
            topology.rank_windows,
            layout,
            config.scheduler,
            config.deadlines,
            ports,
            owner,
            incarnation,
            topology.pool,
            config.tenants,
        )

    if role == "decode":
        return DecodeNode(parts)
    rates = config.rates
    fetch = FetchRates(
        rates.prefill_tokens_per_s, rates.fetch_bytes_per_s, layout.block_bytes, round(rates.fetch_latency_s * 1e9)
    )
    return PrefillNode(parts, fetch if topology.pool else None)
