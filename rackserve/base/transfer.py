"""Movement of KV between memory regions. A transfer ends exactly once: finished, failed or cancelled."""

from __future__ import annotations

from typing import Literal

import msgspec

from rackserve.base.ids import Rank

TransferKind = Literal["fetch", "push", "spill"]
GroupName = Literal["full", "window"]

Region = str
"""Name of a memory region that holds KV slots: a rank's arena or a tray's pool segment."""


def arena_region(rank: Rank, incarnation: int) -> Region:
    """The region of a rank's own KV arena. A restarted rank gets a new one, so that a late write cannot reach it."""
    return f"arena/{rank.worker}.{rank.dp_rank}#{incarnation}"


def segment_region(segment: int) -> Region:
    """The region of a pool segment. Segment numbers are never used again: a tray that comes back joins with a new one."""
    return f"segment/{segment}"


class Copy(msgspec.Struct, frozen=True):
    """Copy slot `source_slots[i]` of one region to `target_slots[i]` of another, for one kind of group."""

    source: Region
    target: Region
    group: GroupName
    source_slots: tuple[int, ...]
    target_slots: tuple[int, ...]


class Transfer(msgspec.Struct, frozen=True):
    """FETCH pool->prefill, PUSH prefill->decode, SPILL device->pool. `number` is unique for the node that starts it."""

    number: int
    kind: TransferKind
    copies: tuple[Copy, ...]

    @property
    def num_slots(self) -> int:
        return sum(len(copy.source_slots) for copy in self.copies)
