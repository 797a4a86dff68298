"""A block store that takes modelled time and, where regions have bytes, really copies them."""

from __future__ import annotations

from collections import deque

import msgspec

from rackserve.base.ids import NodeId
from rackserve.base.kv_layout import KvLayout
from rackserve.base.messages import TransferFailed, TransferFinished
from rackserve.base.transfer import Copy, GroupName, Region, Transfer
from rackserve.base.units import NS_PER_S, Time
from rackserve.sim.host import SimHost


class LinkCost(msgspec.Struct, frozen=True):
    """What a transfer costs: a fixed latency, then bytes over bandwidth."""

    latency_ns: Time = 50_000
    bytes_per_s: float = 2e9

    def duration_ns(self, num_bytes: int) -> Time:
        return self.latency_ns + round(num_bytes / self.bytes_per_s * NS_PER_S)


class SimRegions:
    """Memory regions by name: alive or gone, with bytes (`backed`) or without."""

    def __init__(self, layout: KvLayout, *, backed: bool) -> None:
        self.layout = layout
        self.backed = backed
        self._slot_bytes: dict[GroupName, int] = {"full": layout.block_bytes, "window": layout.window_bytes}
        self._regions: dict[Region, tuple[bytearray, int]] = {}

    def create(self, name: Region, num_blocks: int, num_windows: int) -> memoryview:
        """A new region: `num_blocks` full slots, then `num_windows` window slots, filled with a pattern nobody writes."""
        size = num_blocks * self.layout.block_bytes + num_windows * self.layout.window_bytes
        data = bytearray(b"\xee" * size) if self.backed else bytearray()
        self._regions[name] = (data, num_blocks)
        return memoryview(data)

    def remove(self, name: Region) -> None:
        self._regions.pop(name, None)

    def alive(self, copy: Copy) -> bool:
        return copy.source in self._regions and copy.target in self._regions

    def copy(self, copy: Copy, num_slots: int) -> None:
        """Move the bytes of the first `num_slots` slots."""
        if not self.backed:
            return
        source, source_blocks = self._regions[copy.source]
        target, target_blocks = self._regions[copy.target]
        full = copy.group == "full"
        size = self._slot_bytes[copy.group]
        source_base = 0 if full else source_blocks * self.layout.block_bytes
        target_base = 0 if full else target_blocks * self.layout.block_bytes
        for here, there in zip(copy.source_slots[:num_slots], copy.target_slots[:num_slots], strict=True):
            at, to = source_base + here * size, target_base + there * size
            target[to : to + size] = source[at : at + size]

    def num_bytes(self, transfer: Transfer) -> int:
        """Bytes a transfer moves over the wire."""
        return sum([len(copy.source_slots) * self._slot_bytes[copy.group] for copy in transfer.copies])


class SimStore:
    """BlockStore port of one worker: one transfer at a time, in order; bytes appear at its end, half of them if cancelled."""

    def __init__(self, host: SimHost, name: NodeId, regions: SimRegions, cost: LinkCost) -> None:
        self._host = host
        self._name = name
        self._life = host.life(name) + 1
        self._regions = regions
        self._cost = cost
        self._queue: deque[Transfer] = deque()
        self.slowdown = 1.0

    def start(self, transfer: Transfer) -> None:
        self._queue.append(transfer)
        if len(self._queue) == 1:
            self._begin()

    def cancel(self, number: int) -> None:
        for transfer in self._queue:
            if transfer.number == number:
                self._host.post(self._name, self._host.now, self._end(transfer, "cancelled"))
                return

    def _begin(self) -> None:
        transfer = self._queue[0]
        duration = round(self._cost.duration_ns(self._regions.num_bytes(transfer)) * self.slowdown)
        self._host.call(self._host.now + duration, lambda: self._finish(transfer))

    def _finish(self, transfer: Transfer) -> None:
        if self._host.life(self._name) == self._life and self._queue and self._queue[0] is transfer:
            self._host.deliver(self._name, self._end(transfer, None))

    def _end(self, transfer: Transfer, reason: str | None) -> TransferFinished | TransferFailed:
        was_first = self._queue[0] is transfer
        self._queue.remove(transfer)
        if reason is None and not all(self._regions.alive(copy) for copy in transfer.copies):
            reason = "region is gone"
        for copy in transfer.copies:
            if self._regions.alive(copy) and (reason is None or was_first):
                self._regions.copy(copy, len(copy.source_slots) if reason is None else len(copy.source_slots) // 2)
        number = transfer.number
        if was_first and self._queue:
            self._begin()
        return TransferFinished(number) if reason is None else TransferFailed(number, reason)
