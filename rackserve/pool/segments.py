"""Slots of the trays' pool segments: each is free, used or in quarantine, and freed exactly once.

Segment numbers are never used again: a tray that comes back joins under a new one. So a slot that names a lost segment is
recognised as dead for ever, and freeing it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Rank

INDEX_BITS = 32

FREE, USED, QUARANTINED = 0, 1, 2


def encode(segment: int, index: int) -> int:
    """One number for slot `index` (below 2**32) of `segment`."""
    return segment << INDEX_BITS | index


def decode(slot: int) -> tuple[int, int]:
    """(segment, index) of an encoded slot."""
    return slot >> INDEX_BITS, slot & ((1 << INDEX_BITS) - 1)


def decode_all(slots: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """(segment, index) of each slot; a long prompt has thousands, so no call for each."""
    mask = (1 << INDEX_BITS) - 1
    return tuple([(slot >> INDEX_BITS, slot & mask) for slot in slots])


class Segment:
    """The slots of one tray. `free` is a stack of indices; `states` has one byte per slot."""

    __slots__ = ("free", "rank", "states")

    def __init__(self, num_slots: int, rank: Rank | None) -> None:
        self.free = list(range(num_slots - 1, -1, -1))
        self.states = bytearray(num_slots)
        self.rank = rank


class Segments:
    """All slots of one kind over all trays that are up."""

    __slots__ = ("_seen", "_segments", "num_free")

    def __init__(self) -> None:
        self.num_free = 0
        self._segments: dict[int, Segment] = {}
        self._seen: set[int] = set()

    @property
    def total(self) -> int:
        return sum(len(segment.states) for segment in self._segments.values())

    def join(self, segment: int, num_slots: int, rank: Rank | None = None) -> None:
        """Add an empty segment, near to `rank`'s worker. Raises InvariantError if the number was used before."""
        if segment in self._seen:
            raise InvariantError(f"pool segment {segment} joined twice: a tray that comes back needs a new number")
        self._seen.add(segment)
        self._segments[segment] = Segment(num_slots, rank)
        self.num_free += num_slots

    def lose(self, segment: int) -> bool:
        """All slots of `segment` are gone; False if it was not there."""
        lost = self._segments.pop(segment, None)
        if lost is None:
            return False
        self.num_free -= len(lost.free)
        return True

    def num_alive(self, slots: list[int]) -> int:
        """How many of `slots` come before the first that is lost."""
        if all(number in self._segments for number in {slot >> INDEX_BITS for slot in slots}):
            return len(slots)
        return next(at for at, slot in enumerate(slots) if not self.is_alive(slot))

    def is_alive(self, slot: int) -> bool:
        """Whether the slot's segment is up."""
        return decode(slot)[0] in self._segments

    def near(self, rank: Rank) -> int | None:
        """The segment in the tray of `rank`'s worker, or None."""
        for number, segment in self._segments.items():
            if segment.rank is not None and segment.rank.worker == rank.worker:
                return number
        return None

    def allocate(self, num_slots: int, prefer: int | None = None) -> list[int]:
        """Up to `num_slots` slots: of segment `prefer` first, then of the one with most free slots, and so on."""
        slots: list[int] = []
        near = self._segments.get(prefer) if prefer is not None else None
        if prefer is not None and near is not None:
            self._take(prefer, near, num_slots, slots)
        if len(slots) < num_slots:
            for number in sorted(self._segments, key=lambda number: (-len(self._segments[number].free), number)):
                self._take(number, self._segments[number], num_slots - len(slots), slots)
        return slots

    def _take(self, number: int, segment: Segment, num_slots: int, into: list[int]) -> None:
        at = max(0, len(segment.free) - num_slots)
        indices = segment.free[at:][::-1]
        del segment.free[at:]
        self.num_free -= len(indices)
        for index in indices:
            segment.states[index] = USED
        base = encode(number, 0)
        into += [base | index for index in indices]

    def quarantine(self, slots: Iterable[int]) -> None:
        """Someone who should not may still write to these used slots: keep them out of reach until they are freed."""
        for slot in slots:
            number, index = decode(slot)
            segment = self._segments.get(number)
            if segment is None:
                continue
            if segment.states[index] != USED:
                raise InvariantError(f"slot {index} of pool segment {number} goes to quarantine but is not in use")
            segment.states[index] = QUARANTINED

    def free(self, slots: Iterable[int]) -> None:
        """Take slots back, used or quarantined. Raises InvariantError if one is free already; lost ones are ignored."""
        for slot in slots:
            number, index = decode(slot)
            segment = self._segments.get(number)
            if segment is None:
                continue
            if segment.states[index] == FREE:
                raise InvariantError(f"slot {index} of pool segment {number} is freed twice")
            segment.states[index] = FREE
            segment.free.append(index)
            self.num_free += 1

    def check(self, used: Iterable[int], quarantined: Iterable[int]) -> None:
        """Raise InvariantError unless, of the living slots, exactly `used` and `quarantined` are not free."""
        owned = [slot for slot in (*used, *quarantined) if self.is_alive(slot)]
        quarantined = set(quarantined)
        if len(owned) != len(set(owned)):
            raise InvariantError("a pool slot has two owners")
        for slot in owned:
            number, index = decode(slot)
            if self._segments[number].states[index] != (QUARANTINED if slot in quarantined else USED):
                raise InvariantError(f"slot {index} of pool segment {number} is not in the state of its owner")
        for number, segment in self._segments.items():
            free, states = segment.free, segment.states
            marked = bytes(map(states.__getitem__, free)).count(FREE)
            if not len(free) == len(set(free)) == marked == states.count(FREE):
                raise InvariantError(f"the free list of pool segment {number} is wrong")
        if self.num_free != sum(len(segment.free) for segment in self._segments.values()):
            raise InvariantError(f"{self.num_free} pool slots are counted as free and are not")
        if len(owned) + self.num_free != self.total:
            raise InvariantError(f"{len(owned)} pool slots owned + {self.num_free} free != {self.total}")
