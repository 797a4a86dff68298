"""What a device's memory holds, line by line, and which line does not fit."""

from __future__ import annotations

import msgspec

from rackserve.base.errors import ResourceError

USABLE = 0.9
"""Share of a device's memory that engines plan with by default; drivers, graphs and fragments take the rest."""


class Line(msgspec.Struct, frozen=True):
    """One part of a device's memory, and what makes it smaller."""

    name: str
    num_bytes: int
    remedy: str


class MemoryPlan(msgspec.Struct, frozen=True):
    """What a device holds, in the order in which it is allocated. `who` names the device in errors."""

    who: str
    lines: tuple[Line, ...]

    @property
    def total_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    def require_fit(self, capacity_bytes: int) -> None:
        """ResourceError naming the first line with which the sum exceeds `capacity_bytes`, and what to change."""
        taken = 0
        for line in self.lines:
            if taken + line.num_bytes > capacity_bytes:
                raise ResourceError(
                    f"{self.who}: no room for {line.name}: {line.num_bytes:,} bytes, but {capacity_bytes - taken:,} of "
                    f"{capacity_bytes:,} are left; {line.remedy}"
                )
            taken += line.num_bytes

    def num_more(self, capacity_bytes: int, unit_bytes: float) -> int:
        """How many more things of `unit_bytes` each fit beside all lines."""
        return int(max(capacity_bytes - self.total_bytes, 0) // unit_bytes)
