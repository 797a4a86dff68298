"""The transfers of one worker: what touches whose blocks, and what happens at each end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rackserve.base.events import TransferDone
from rackserve.base.ids import Rank
from rackserve.base.kv_layout import KvLayout
from rackserve.base.messages import Timeout, TransferFailed, TransferFinished
from rackserve.base.transfer import Copy, GroupName, Region, Transfer, TransferKind, segment_region
from rackserve.base.units import Time
from rackserve.nodes.alarms import Alarms
from rackserve.nodes.ports import Ports
from rackserve.ports import BlockStore
from rackserve.sched.sequence import Sequence

OnEnd = Callable[[bool], None]
"""Called once with whether a transfer finished (True) or failed or was cancelled (False)."""


@dataclass(slots=True)
class _Move:
    transfer: Transfer
    sequence: Sequence
    on_end: OnEnd
    started: Time


class Moves:
    """Transfers under way. Each holds its sequence's blocks until its one end, cancelled or not."""

    def __init__(
        self,
        store: BlockStore,
        layout: KvLayout,
        alarms: Alarms,
        limit_ns: Time,
        ports: Ports,
        rank_of: Callable[[Sequence], Rank],
    ) -> None:
        self._store = store
        self._slot_bytes: dict[GroupName, int] = {"full": layout.block_bytes, "window": layout.window_bytes}
        self._alarms = alarms
        self._limit_ns = limit_ns
        self._ports = ports
        self._rank_of = rank_of
        self._moves: dict[int, _Move] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._moves)

    def under_way(self) -> list[tuple[Transfer, Sequence]]:
        """Each transfer, and the sequence whose blocks it touches."""
        return [(move.transfer, move.sequence) for move in self._moves.values()]

    def start(self, kind: TransferKind, sequence: Sequence, copies: list[Copy], on_end: OnEnd) -> int:
        """Start a transfer that touches the blocks of `sequence`; returns its number."""
        self._numbers += 1
        transfer = Transfer(self._numbers, kind, tuple(copies))
        now = self._ports.clock.now()
        self._moves[transfer.number] = _Move(transfer, sequence, on_end, now)
        sequence.holds += 1
        self._store.start(transfer)
        self._alarms.set(now + self._limit_ns, Timeout("transfer", str(transfer.number)))
        return transfer.number

    def cancel(self, number: int) -> None:
        """Ask for the end of a transfer; it comes as a message like any other end."""
        if number in self._moves:
            self._store.cancel(number)

    def cancel_all(self, sequence: Sequence, kind: TransferKind) -> None:
        for move in list(self._moves.values()):
            if move.sequence is sequence and move.transfer.kind == kind:
                self._store.cancel(move.transfer.number)

    def count(self, sequence: Sequence, kind: TransferKind) -> int:
        """Transfers of this kind under way for `sequence`."""
        return sum(move.sequence is sequence and move.transfer.kind == kind for move in self._moves.values())

    def end(self, message: TransferFinished | TransferFailed) -> Sequence | None:
        """Take a transfer's end; returns its sequence, or None if the transfer is not known (any more)."""
        move = self._moves.pop(message.number, None)
        if move is None:
            return None
        self._alarms.clear(str(message.number))
        move.sequence.holds -= 1
        finished = isinstance(message, TransferFinished)
        self._ports.recorder.record(
            TransferDone(
                move.transfer.kind,
                self._rank_of(move.sequence),
                move.transfer.num_slots,
                sum([len(copy.source_slots) * self._slot_bytes[copy.group] for copy in move.transfer.copies]),
                self._ports.clock.now() - move.started,
                "finished" if finished else "failed",
                *move.sequence.key,
            )
        )
        move.on_end(finished)
        return move.sequence


def pool_copies(
    region: Region, slots: list[int], pool_slots: tuple[tuple[int, int], ...], group: GroupName, *, to_pool: bool
) -> list[Copy]:
    """Copies between arena `slots` and pool slots (segment, index), one per segment touched."""
    by_segment: dict[int, tuple[list[int], list[int]]] = {}
    for slot, (segment, index) in zip(slots, pool_slots, strict=True):
        ours, theirs = by_segment.setdefault(segment, ([], []))
        ours.append(slot)
        theirs.append(index)
    copies = []
    for segment, (ours, theirs) in by_segment.items():
        here, there = (region, tuple(ours)), (segment_region(segment), tuple(theirs))
        source, target = (here, there) if to_pool else (there, here)
        copies.append(Copy(source[0], target[0], group, source[1], target[1]))
    return copies
