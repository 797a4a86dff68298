"""Requests that wait for blocks: an order by name, and a bound on how often a large one may be passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from rackserve.sched.sequence import Sequence


@dataclass(slots=True, eq=False)
class Waiting:
    """A queued sequence, the order it came in, and how often others were admitted before it."""

    sequence: Sequence
    arrival: int
    skips: int = 0


class QueueOrder(Protocol):
    """Smaller goes first. `divides`: short prompts also get a part of each step beside a long one (see `turns`)."""

    divides: bool

    def rank(self, waiting: Waiting) -> tuple[int, int]: ...


class FirstComeFirstServed:
    """By arrival."""

    divides = False

    def rank(self, waiting: Waiting) -> tuple[int, int]:
        return (0, waiting.arrival)


class ShortestFirst:
    """By prompt length, each skip counting as 1/4 of it, so that a long one ages to the front."""

    divides = True

    def rank(self, waiting: Waiting) -> tuple[int, int]:
        length = waiting.sequence.num_known
        return (length - length * waiting.skips // 4, waiting.arrival)


ORDERS: dict[str, type[QueueOrder]] = {"fcfs": FirstComeFirstServed, "shortest_first": ShortestFirst}


def turns(waiting: list[tuple[int, Sequence]], budget: int, num_draft: int, *, divided: bool) -> list[tuple[Sequence, int]]:
    """Who may compute in a step of `budget` positions, and how many at most: those that generate, then prompts.

    waiting  pending positions and sequence, in order of admission
    divided  half of what prompts get is the oldest one's and the rest is for the shortest, so that none waits for a long one
             and no long one waits for ever; else each takes what those before it have left
    """
    turn = [(sequence, budget) for pending, sequence in waiting if pending and sequence.outputs]
    prompts = [part for part in waiting if part[0] and not part[1].outputs]
    if not divided or len(prompts) < 2:
        return turn + [(sequence, budget) for _, sequence in prompts]
    (_, oldest), *others = prompts
    left = budget - len(turn) * (num_draft + 1)
    others.sort(key=lambda part: part[0])
    own = max(left - left // 2, left - sum(pending for pending, _ in others), 1)
    return [*turn, (oldest, own), *((sequence, budget) for _, sequence in others)]


class WaitingQueue:
    """Sequences in state `queued`, picked in order; one that does not fit is passed at most `max_skips` times."""

    def __init__(self, order: QueueOrder, max_skips: int) -> None:
        self._order = order
        self._max_skips = max_skips
        self._waiting: dict[int, Waiting] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return (waiting.sequence for waiting in self._waiting.values())

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        self._waiting[sequence.number] = Waiting(sequence, self._arrivals)

    def remove(self, sequence: Sequence) -> bool:
        return self._waiting.pop(sequence.number, None) is not None

    def pick(self, admit: Callable[[Sequence], bool | None]) -> Sequence | None:
        """Offer waiting sequences in order until one is admitted, and return it.

        `admit` answers True (admitted), False (does not fit now: may be passed) or None (waits for another sequence's work:
        passing it is no loss and is not counted).
        """
        if len(self._waiting) == 1:  # nobody to pass or to be passed by
            (only,) = self._waiting.values()
            if not admit(only.sequence):
                return None
            self._waiting.clear()
            return only.sequence
        offered: list[Waiting] = []
        passed: list[Waiting] = []
        for waiting in sorted(self._waiting.values(), key=self._order.rank):
            offered.append(waiting)
            answer = admit(waiting.sequence)
            if answer:
                del self._waiting[waiting.sequence.number]
                overtaken = (w for w in self._waiting.values() if w.arrival < waiting.arrival and w not in offered)
                for other in (*passed, *overtaken):
                    other.skips += 1
                return waiting.sequence
            if answer is False:
                if waiting.skips >= self._max_skips:
                    return None
                passed.append(waiting)
        return None
