"""Which cores a device of a rack computes on."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from rackserve.base.topology import ROLES, Topology
from rackserve.live.rank_spec import RankSpec


class Cores(msgspec.Struct, frozen=True):
    """`threads` share a step; `cores`: where, one each, or () for wherever the system wants."""

    threads: int = 1
    cores: tuple[int, ...] = ()


def allowed_cores() -> tuple[int, ...]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def share_cores(threads: int, device: int, num_devices: int, allowed: Sequence[int]) -> Cores:
    """Cores of device `device` of `num_devices` on a machine. threads: of each; 0: `allowed` shared out, at least 1 each.

    Devices have cores of their own where there are enough for all; a lone thread is never tied to one.
    """
    threads = threads or max(1, len(allowed) // num_devices)
    if threads == 1 or threads * num_devices > len(allowed):
        return Cores(threads)
    return Cores(threads, tuple(allowed[device * threads : (device + 1) * threads]))


def cores_of(spec: RankSpec, device: int) -> Cores:
    """Cores of device `device` of a worker, whose rack is all on this machine."""
    topology = spec.config.topology
    before = sum(_devices(topology, worker) for worker in spec.workers[: spec.workers.index(spec.worker)])
    return share_cores(spec.runner.threads, before + device, topology.num_devices, allowed_cores())


def _devices(topology: Topology, worker: str) -> int:
    role = next(role for role in ROLES if worker in topology.workers(role))
    return topology.group_size(role) * topology.tensor_parallel(role)
