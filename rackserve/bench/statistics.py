"""How far a figure of a few runs can be believed: bootstrap intervals, paired differences, and whether a rack was saturated.

Requests of one session are not independent, so whole sessions are drawn; runs of one seed are the same sessions from the same
points, so set-ups are compared seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Literal, TypeVar

import msgspec

from rackserve.bench.metrics import percentile

T = TypeVar("T")
Run = Mapping[str, T]
"""What is known of each session of one run."""
Statistic = Callable[[Sequence[T]], float | None]
"""A figure of a run from its sessions; None where it has none."""

Saturation = Literal["STABLE", "SATURATED", "OVERLOADED"]
DRAWS = 200
COVERAGE = 0.9
"""Share of draws that lies within an interval."""
FULL = 0.95
"""From this utilisation on a waiting time says more of the length of the run than of the rack."""


class Interval(msgspec.Struct, frozen=True):
    """An estimate, and where `COVERAGE` of the draws lay."""

    estimate: float
    low: float
    high: float


def bootstrap(runs: Sequence[Run[T]], statistic: Statistic[T], draws: int = DRAWS, seed: int = 0) -> Interval | None:
    """The mean of a figure over runs. Each draw takes as many runs, then as many sessions of each, with replacement.

    None if a run has no such figure.
    """
    found = [statistic(list(run.values())) for run in runs]
    known = [value for value in found if value is not None]
    if not known or len(known) < len(found):
        return None
    chance = Random(seed)
    sessions = [list(run.values()) for run in runs]
    means = []
    for _ in range(draws):
        drawn = [statistic(_resample(chance, chance.choice(sessions))) for _ in runs]
        values = [value for value in drawn if value is not None]
        if values:
            means.append(sum(values) / len(values))
    return _interval(sum(known) / len(known), means)


class Paired(msgspec.Struct, frozen=True):
    """A figure of the first set-up against that of the second, seed by seed.

    differences   first - second of each pair
    difference    their mean
    ratio         mean of first / second; None where a second is 0
    """

    differences: tuple[float, ...]
    difference: Interval
    ratio: Interval | None

    @property
    def num_agreeing(self) -> int:
        """Pairs whose difference has the sign of the mean."""
        return sum(value * self.difference.estimate > 0 for value in self.differences)


def paired(
    first: Sequence[Run[T]], second: Sequence[Run[T]], statistic: Statistic[T], draws: int = DRAWS, seed: int = 0
) -> Paired | None:
    """Compare two set-ups that were run with the same seeds, in the same order. None if a run has no such figure.

    Each draw takes as many pairs with replacement and, in both runs of a pair, the same sessions.
    """
    if len(first) != len(second):
        raise ValueError(f"pairs need as many first runs as second ones, got {len(first)} and {len(second)}")
    found = [(statistic(list(a.values())), statistic(list(b.values()))) for a, b in zip(first, second, strict=True)]
    known = [(a, b) for a, b in found if a is not None and b is not None]
    if not known or len(known) < len(found):
        return None
    chance = Random(seed)
    names = [sorted(a.keys() | b.keys()) for a, b in zip(first, second, strict=True)]
    differences, ratios = [], []
    for _ in range(draws):
        pairs = [_draw_pair(chance, first, second, names, statistic) for _ in first]
        drawn = [(a, b) for a, b in pairs if a is not None and b is not None]
        if drawn:
            differences.append(sum(a - b for a, b in drawn) / len(drawn))
            if all(b for _, b in drawn):
                ratios.append(sum(a / b for a, b in drawn) / len(drawn))
    each = tuple(a - b for a, b in known)
    ratio = None
    if all(b for _, b in known) and ratios:
        ratio = _interval(sum(a / b for a, b in known) / len(known), ratios)
    return Paired(each, _interval(sum(each) / len(each), differences), ratio)


def _draw_pair(
    chance: Random,
    first: Sequence[Run[T]],
    second: Sequence[Run[T]],
    names: Sequence[Sequence[str]],
    statistic: Statistic[T],
) -> tuple[float | None, float | None]:
    at = chance.randrange(len(names))
    chosen = _resample(chance, names[at])
    a, b = ([run[at][name] for name in chosen if name in run[at]] for run in (first, second))
    return statistic(a), statistic(b)


def _resample(chance: Random, items: Sequence[T]) -> list[T]:
    """As many of `items`, with replacement."""
    return chance.choices(items, k=len(items)) if items else []


def _interval(estimate: float, draws: Sequence[float]) -> Interval:
    if not draws:
        return Interval(estimate, estimate, estimate)
    ordered, tail = sorted(draws), (1 - COVERAGE) / 2
    return Interval(estimate, percentile(ordered, tail), percentile(ordered, 1 - tail))


def saturation(utilisation: float, waiting: Sequence[float]) -> Saturation:
    """What a rack's waiting times are worth, from its utilisation and how many requests waited in each part of the window.

    STABLE      some time was left idle
    SATURATED   hardly any was (`FULL`), but no more waited in the last third than in the first
    OVERLOADED  and more and more waited: a longer run would have shown longer waits
    """
    if utilisation < FULL:
        return "STABLE"
    third = max(1, len(waiting) // 3)
    early, late = (sum(part) / len(part) if part else 0.0 for part in (waiting[:third], waiting[-third:]))
    return "OVERLOADED" if late > 1.25 * early + 1 else "SATURATED"
