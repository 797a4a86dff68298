"""Which ranks, groups and trays a rack is made of: data that both hosts build their nodes from."""

from __future__ import annotations

from typing import Literal

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.ids import NodeId, Rank
from rackserve.base.ranges import require_range

Role = Literal["prefill", "decode"]

ROLES: tuple[Role, Role] = ("prefill", "decode")

MAX_WORKERS = 4096
MAX_RANKS = 64

MAX_BLOCKS = 10**8
"""In one arena or segment, and in all of them together: their books take about 40 bytes a block in a simulation."""


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rack of `prefill_workers` + `decode_workers` groups.

    prefill_ranks, decode_ranks    ranks per worker; the ranks of a worker run their steps in lockstep (2 = DEP2)
    prefill_blocks, decode_blocks  KV blocks in each rank's own arena
    prefill_tp, decode_tp          devices that compute one rank together, each a part of every product (tensor parallel)
    pool                           whether trays contribute DRAM to one rack-wide KV pool (one tray per worker)
    segment_blocks                 KV blocks in each tray's pool segment
    rank_windows, segment_windows  slots for resume state in each arena and segment (models with window groups only)
    """

    prefill_workers: int = 2
    decode_workers: int = 1
    prefill_ranks: int = 1
    decode_ranks: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_blocks: int = 512
    decode_blocks: int = 1024
    pool: bool = True
    segment_blocks: int = 1024
    rank_windows: int = 0
    segment_windows: int = 0

    def __post_init__(self) -> None:
        require_range("topology", self, ("prefill_workers", "decode_workers"), 1, MAX_WORKERS)
        require_range("topology", self, ("prefill_ranks", "decode_ranks", "prefill_tp", "decode_tp"), 1, MAX_RANKS)
        require_range("topology", self, ("prefill_blocks", "decode_blocks"), 1, MAX_BLOCKS)
        require_range("topology", self, ("segment_blocks", "rank_windows", "segment_windows"), 0, MAX_BLOCKS)
        if self.pool and not self.segment_blocks:
            raise ConfigError("topology.segment_blocks must be at least 1 when topology.pool is on, got 0")
        if self._num_slots > MAX_BLOCKS:
            raise ConfigError(
                f"topology: all arenas and segments together hold {self._num_slots} blocks and resume states, at most "
                f"{MAX_BLOCKS} may be; lower topology.prefill_blocks, topology.decode_blocks or topology.segment_blocks"
            )

    def workers(self, role: Role) -> tuple[NodeId, ...]:
        count = self.prefill_workers if role == "prefill" else self.decode_workers
        return tuple(f"{role}{number}" for number in range(count))

    def group_size(self, role: Role) -> int:
        return self.prefill_ranks if role == "prefill" else self.decode_ranks

    def tensor_parallel(self, role: Role) -> int:
        return self.prefill_tp if role == "prefill" else self.decode_tp

    @property
    def num_devices(self) -> int:
        """Devices over all workers."""
        prefill = self.prefill_workers * self.prefill_ranks * self.prefill_tp
        return prefill + self.decode_workers * self.decode_ranks * self.decode_tp

    def num_blocks(self, role: Role) -> int:
        return self.prefill_blocks if role == "prefill" else self.decode_blocks

    def ranks(self, role: Role) -> tuple[Rank, ...]:
        return tuple(Rank(worker, index) for worker in self.workers(role) for index in range(self.group_size(role)))

    @property
    def _num_slots(self) -> int:
        prefill = self.prefill_workers * self.prefill_ranks * (self.prefill_blocks + self.rank_windows)
        decode = self.decode_workers * self.decode_ranks * (self.decode_blocks + self.rank_windows)
        return prefill + decode + self.num_segments * (self.segment_blocks + self.segment_windows)

    @property
    def num_segments(self) -> int:
        """One pool segment per worker's tray."""
        return self.prefill_workers + self.decode_workers if self.pool else 0
