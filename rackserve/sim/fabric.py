"""What moving bytes between chips takes: exchanges inside a group, and transfers of cached state over a rack."""

from __future__ import annotations

from typing import Literal

from rackserve.base.units import Time, to_ns
from rackserve.sim.hardware import Chip
from rackserve.sim.store import LinkCost

Path = Literal["link", "nic", "host"]

FIELDS: dict[Path, str] = {"link": "link_bytes_per_s", "nic": "nic_bytes_per_s", "host": "host_link_bytes_per_s"}
"""The chip's bandwidth by the way that bytes take: fast link, network, or to its own host's memory."""


def alltoall_s(chip: Chip, num_ranks: int, num_bytes: float, latency_s: float) -> float:
    """Seconds in which each of `num_ranks` ranks spreads `num_bytes` over all of them, its own share staying where it is."""
    if num_ranks < 2:
        return 0.0
    return latency_s + num_bytes * (num_ranks - 1) / num_ranks / chip.number("link_bytes_per_s")


def allreduce_s(chip: Chip, num_chips: int, num_bytes: float, latency_s: float) -> float:
    """Seconds in which `num_chips` chips sum `num_bytes` each: every byte leaves a chip and comes back summed."""
    if num_chips < 2:
        return 0.0
    return latency_s + 2 * num_bytes * (num_chips - 1) / num_chips / chip.number("link_bytes_per_s")


def link_cost(chip: Chip, path: Path, latency_us: float, share: float = 1.0) -> LinkCost:
    """What a transfer of cached state over `path` costs, at `share` of its bandwidth. ConfigError if that is unknown."""
    latency: Time = to_ns(latency_us * 1e-6)
    return LinkCost(latency, chip.number(FIELDS[path]) * share)
