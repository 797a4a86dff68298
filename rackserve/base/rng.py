"""The only source of randomness below the hosts: counter-based, so a draw depends on its name and not on what ran before."""

from __future__ import annotations

from hashlib import blake2b


def draw_u64(*names: str | int) -> int:
    """A 64-bit integer that is a function of `names` alone, the same in every process."""
    text = "\x1f".join(str(name) for name in names)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def draw_unit(*names: str | int) -> float:
    """A float in [0, 1) that is a function of `names` alone."""
    return (draw_u64(*names) >> 11) / (1 << 53)


def draw_below(bound: int, *names: str | int) -> int:
    """An integer in [0, bound) that is a function of `names` alone."""
    return draw_u64(*names) % bound


class Stream:
    """A named sequence of draws: `Stream("faults", seed)` gives the same numbers wherever it is used."""

    __slots__ = ("_count", "_name")

    def __init__(self, *names: str | int) -> None:
        self._name = "\x1f".join(str(name) for name in names)
        self._count = 0

    def u64(self) -> int:
        self._count += 1
        return draw_u64(self._name, self._count)

    def unit(self) -> float:
        return (self.u64() >> 11) / (1 << 53)

    def below(self, bound: int) -> int:
        return self.u64() % bound

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1)

    def chance(self, probability: float) -> bool:
        return self.unit() < probability
