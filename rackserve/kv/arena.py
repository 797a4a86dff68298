"""A fixed number of slots; each is free or has exactly one owner."""

from __future__ import annotations

from collections.abc import Iterable

from rackserve.base.errors import InvariantError


class Arena:
    """Slots 0 .. total - 1. The slot freed last is given out first, so a small working set stays warm."""

    __slots__ = ("_free", "_taken", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._taken = bytearray(total)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_slots: int) -> list[int] | None:
        """`num_slots` slots that belong to the caller now, or None (and nothing taken) if fewer are free."""
        if num_slots > len(self._free):
            return None
        at = len(self._free) - num_slots
        slots = self._free[at:][::-1]
        del self._free[at:]
        taken = self._taken
        for slot in slots:
            taken[slot] = 1
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Take slots back. Raises InvariantError on a slot that is not given out."""
        slots = list(slots)
        if not slots:
            return
        if min(slots) < 0 or max(slots) >= self.total:
            raise InvariantError(f"slots {min(slots)} to {max(slots)} were freed but are not given out: there are {self.total}")
        taken = self._taken
        for slot in slots:
            if not taken[slot]:
                raise InvariantError(f"slot {slot} was freed but is not given out")
            taken[slot] = 0
        self._free += slots

    def check(self, owned: Iterable[int]) -> None:
        """Raise InvariantError unless `owned` lists every slot that is given out exactly once, and the rest is free."""
        if sorted([*self._free, *owned]) != list(range(self.total)):
            raise InvariantError(f"free and owned slots do not add up to {self.total}: a slot is lost or has two owners")
        if sum(self._taken) != self.total - len(self._free):
            raise InvariantError("a free slot is marked as given out")
