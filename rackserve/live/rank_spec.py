"""What the control process tells a rank process when it starts it, and what is known of the rank then."""

from __future__ import annotations

import msgspec

from rackserve.assemble import RackConfig
from rackserve.base.ids import NodeId, Rank
from rackserve.base.kv_layout import KvLayout
from rackserve.base.topology import ROLES, Role
from rackserve.base.transfer import Region, arena_region
from rackserve.base.units import Time
from rackserve.live.regions import RegionFile
from rackserve.live.runner import RunnerSpec
from rackserve.live.step_times import StepTimes
from rackserve.live.transport import Meeting

READY_CHANNEL = "#ready"
"""rank -> control: the worker node is built and listens. A `Ready`."""

BEAT_CHANNEL = "#beat"
"""rank -> control: a `Beat`."""

REGIONS_CHANNEL = "#regions"
"""control -> rank: the regions that exist from now on, as msgpack of tuple[RegionFile, ...]."""

BEAT_PERIOD_S = 0.5


class Limits(msgspec.Struct, frozen=True):
    """Seconds that the supervisor gives a rank process (see `SupervisorConfig`), for what it must itself watch over."""

    ready: float = 300.0
    heartbeat: float = 10.0
    step: float = 300.0


class RankSpec(msgspec.Struct, frozen=True):
    """The process that leads a worker: sent as one line of JSON on its standard input, which stays open as long as the control
    process lives.
    """

    worker: NodeId
    role: Role
    incarnation: int
    meeting: Meeting
    regions: tuple[RegionFile, ...]
    layout: KvLayout
    runner: RunnerSpec
    config: RackConfig
    limits: Limits = Limits()

    @property
    def workers(self) -> tuple[NodeId, ...]:
        """All workers of the rack."""
        return tuple(worker for role in ROLES for worker in self.config.topology.workers(role))

    @property
    def tp_size(self) -> int:
        """Devices that compute one rank of the worker together."""
        return self.config.topology.tensor_parallel(self.role)

    @property
    def num_ranks(self) -> int:
        return self.config.topology.group_size(self.role)

    @property
    def num_devices(self) -> int:
        """Devices of the worker, rank after rank; each is a process, and device 0 leads."""
        return self.num_ranks * self.tp_size

    def arena(self, dp_rank: int) -> Region:
        """The region that holds the KV of a rank of the worker."""
        return arena_region(Rank(self.worker, dp_rank), self.incarnation)


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """pids: process ids of its devices; kernels, threads: what each computes with (see `live.computing`)."""

    pids: tuple[int, ...] = ()
    kernels: str = ""
    threads: int = 1


class KvUse(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks of a rank: those that running requests hold or read, those in its prefix cache (read or not), and all."""

    used: int
    cached: int
    total: int


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """Sign of life.

    step_started_ns  monotonic start of the step being computed, 0 if none is
    kv               what each rank's KV blocks are doing
    times            where each rank's time went
    """

    steps_done: int
    step_started_ns: Time
    kv: tuple[KvUse, ...] = ()
    times: tuple[StepTimes, ...] = ()


class RankStatus(msgspec.Struct, frozen=True):
    """What is known of one worker. Ages are in seconds; -1 if there is nothing to measure from.

    state       "starting", "up", "down" (to be restarted), "failed" (too many restarts) or "stopped"
    beat_age    since its last sign of life; step_age: since the start of the step it computes now
    steps_done  by this incarnation
    devices     process ids of its devices, the leading one (`pid`) first; known once it is ready
    kernels, threads  what each of its devices computes with, and on how many cores; known once it was ready
    kv, times   what the KV blocks of each of its ranks do; where the time of its engine went, by this incarnation
    """

    worker: NodeId
    role: Role
    state: str
    pid: int
    incarnation: int
    restarts: int
    beat_age: float
    step_age: float
    steps_done: int
    devices: tuple[int, ...] = ()
    kv: tuple[KvUse, ...] = ()
    times: tuple[StepTimes, ...] = ()
    kernels: str = ""
    threads: int = 1
