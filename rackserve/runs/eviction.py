"""Which run goes first: eviction orders by name, and the heap that finds the first one without a scan."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)
Place = tuple[int, int]
"""A place in the order of eviction; the smallest goes first."""


class EvictionOrder(Protocol):
    """Pure. `tick`: logical time of the last use; `uses`: how often it was pinned. Must not fall when either rises."""

    def __call__(self, tick: int, uses: int) -> Place: ...


def lru(tick: int, uses: int) -> Place:
    """Least recently used first."""
    return (tick, uses)


def lfu(tick: int, uses: int) -> Place:
    """Least often pinned first, the least recently used of those before others."""
    return (uses, tick)


EVICTION_ORDERS: dict[str, EvictionOrder] = {"lru": lru, "lfu": lfu}


class LazyHeap(Generic[T]):
    """Items by a place that only ever rises, smallest first: add and discard are O(log n), a changed place costs nothing.

    An entry holds the place at the time it was added. It is a lower bound, so an entry that comes up stale is filed again.
    """

    __slots__ = ("_added", "_heap", "_numbers", "_place")

    def __init__(self, place: Callable[[T], Place]) -> None:
        self._place = place
        self._heap: list[tuple[Place, int, T]] = []
        self._numbers: dict[T, int] = {}  # item -> number of its one valid entry
        self._added = 0

    def __contains__(self, item: T) -> bool:
        return item in self._numbers

    def add(self, item: T) -> None:
        """File `item`; nothing happens if it is filed already."""
        if item not in self._numbers:
            self._file(item)

    def discard(self, item: T) -> None:
        """Forget `item` if it is filed."""
        self._numbers.pop(item, None)
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._numbers):  # invalid entries must not pile up
            self._heap = [entry for entry in self._heap if self._numbers.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def pop(self, fit: Callable[[T], bool]) -> T | None:
        """Take out the first item that is `fit`, or None. Items found unfit are forgotten: add them again once they are fit."""
        while self._heap:
            place, number, item = heappop(self._heap)
            if self._numbers.get(item) != number:
                continue
            del self._numbers[item]
            if not fit(item):
                continue
            if self._place(item) == place:
                return item
            self._file(item)
        return None

    def first_place(self, fit: Callable[[T], bool]) -> Place | None:
        """The place of the item that `pop` would take out."""
        item = self.pop(fit)
        if item is None:
            return None
        self._file(item)
        return self._place(item)

    def _file(self, item: T) -> None:
        self._added += 1
        self._numbers[item] = self._added
        heappush(self._heap, (self._place(item), self._added, item))
