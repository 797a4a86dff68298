"""Which drafted tokens a step verifies: all of them, or those that pay for their place in the forward pass.

A draft is chosen before anything that depends on its value is looked at, so choosing does not bend the law of sampled output.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from statistics import median
from typing import ClassVar, Protocol

import msgspec

from rackserve.base.errors import ConfigError, InvariantError


class CostTable(msgspec.Struct, frozen=True):
    """Seconds of a forward pass by its number of tokens, or of requests: straight lines between measured points.

    points  (number >= 0, seconds > 0), numbers rising, seconds not falling. Below the first point its seconds hold, beyond the
            last the slope before it.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("points of a cost table: there are none; measure at least one number of tokens")
        if self.points[0][0] < 0 or any(not 0.0 < seconds < math.inf for _, seconds in self.points):
            raise ConfigError(f"points of a cost table: numbers from 0 and finite seconds above 0, not {self.points}")
        for (number, seconds), (next_number, next_seconds) in pairwise(self.points):
            if next_number <= number or next_seconds < seconds:
                raise ConfigError(
                    f"points of a cost table: {next_number} ({next_seconds} s) after {number} ({seconds} s); "
                    "numbers must rise and seconds not fall (fit_costs makes them so)"
                )

    def at(self, number: int) -> float:
        """Seconds for `number` tokens or requests."""
        points = self.points
        after = bisect_right(points, number, key=lambda point: point[0])
        if after == 0 or len(points) == 1:
            return points[0][1]
        (low, fast), (high, slow) = points[after - 1 : after + 1] if after < len(points) else points[-2:]
        return fast + (slow - fast) * ((number - low) / (high - low))


def fit_costs(samples: Iterable[tuple[int, float]]) -> CostTable:
    """A table of measured (number, seconds) `samples`: medians by number; neighbours out of order share their mean.

    The mean is weighted by samples. `ConfigError` without samples, or with seconds that are not finite and above 0.
    """
    seconds_of: dict[int, list[float]] = {}
    for number, seconds in samples:
        if not 0.0 < seconds < math.inf:
            raise ConfigError(f"a measured pass of {number} tokens took {seconds} s; measure it again")
        seconds_of.setdefault(number, []).append(seconds)
    pools: list[tuple[float, int, tuple[int, ...]]] = []  # mean of medians, samples, numbers
    for number, measured in sorted(seconds_of.items()):
        pools.append((median(measured), len(measured), (number,)))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (before, few, first), (after, more, last) = pools[-2:]
            pools[-2:] = [((before * few + after * more) / (few + more), few + more, first + last)]
    return CostTable(tuple((number, mean) for mean, _, numbers in pools for number in numbers))


class DraftCosts(msgspec.Struct, frozen=True):
    """What drafting costs, by requests drafted for, and what a pass of the model costs, by all its tokens."""

    draft: CostTable
    verify: CostTable


UNMEASURED = DraftCosts(CostTable(((1, 1.0),)), CostTable(((1, 1.0),)))
"""Stands in where nothing was measured: a pass costs the same whatever is in it, so every draft with a chance pays."""


class Drafted(msgspec.Struct, frozen=True):
    """The drafts of a step.

    acceptance    per sampling sequence, per draft in order: the chance in [0, 1] that it stands if those before it do. That of
                  a draft may depend on the drafts before it, not on itself
    other_tokens  tokens of the step besides the sampling sequences' one each and their drafts
    max_drafts    drafts to verify for one sequence, at most
    budget        drafts to verify in the step, at most
    """

    acceptance: tuple[tuple[float, ...], ...]
    other_tokens: int
    max_drafts: int
    budget: int

    def __post_init__(self) -> None:
        for number, chances in enumerate(self.acceptance):
            if not all(0.0 <= chance <= 1.0 for chance in chances):
                raise InvariantError(f"acceptance of sequence {number} of the step is {chances}: not chances in [0, 1]")

    def limit(self, number: int) -> int:
        """Drafts that may be verified for sequence `number` of the step."""
        return min(len(self.acceptance[number]), self.max_drafts)


def acceptance(confidence: Sequence[float], temperatures: Sequence[float] = ()) -> tuple[float, ...]:
    """Chances of a sequence's drafts from the logits of the confidence head, each divided by its position's temperature.

    `temperatures` (> 0, fitted so that chances come true) has an entry for every position of a block, or none at all.
    """
    if any(not 0.0 < temperature < math.inf for temperature in temperatures):
        raise ConfigError(f"confidence temperatures are {tuple(temperatures)}: give finite numbers above 0")
    if temperatures and len(temperatures) < len(confidence):
        raise ConfigError(f"confidence temperatures: {len(temperatures)} for {len(confidence)} drafts; give one a position")
    scaled = [logit / temperature for logit, temperature in zip(confidence, temperatures, strict=False)]
    return tuple(_sigmoid(logit) for logit in (scaled if temperatures else confidence))


def _sigmoid(value: float) -> float:
    small = math.exp(-abs(value))  # never overflows
    return (1.0 if value >= 0.0 else small) / (1.0 + small)


class DraftPolicy(Protocol):
    """How many drafts to verify for each sequence, in the order of `drafted`, within its limits.

    weighs_costs: whether `costs` matter to it and are worth measuring.
    """

    weighs_costs: ClassVar[bool]

    def choose(self, drafted: Drafted, costs: DraftCosts) -> list[int]: ...


class VerifyAll:
    """Everything drafted; where the budget is short, first drafts before second ones."""

    weighs_costs: ClassVar[bool] = False

    def choose(self, drafted: Drafted, costs: DraftCosts) -> list[int]:
        counts, left = [0] * len(drafted.acceptance), drafted.budget
        for position in range(max(map(len, drafted.acceptance), default=0)):
            for number in range(len(counts)):
                if left > 0 and position < drafted.limit(number):
                    counts[number] += 1
                    left -= 1
        return counts


class Adaptive:
    """As many of the likeliest drafts as give most expected tokens per second.

    A draft survives if it and all before it stand. Drafts are taken by falling survival (ties: lowest position, then lowest
    sequence) for as long as more of them raise expected tokens / second, were all of those as likely as the next one. So a
    dip is crossed if what lies behind may be worth it, and with convex costs the choice is the best there is. Chances behind
    the next draft are not looked at: a draft verified because of its successors' chances is one verified because of its own
    value, and sampled output would be bent.
    """

    weighs_costs: ClassVar[bool] = True

    def choose(self, drafted: Drafted, costs: DraftCosts) -> list[int]:
        counts = [0] * len(drafted.acceptance)
        limits = [drafted.limit(number) for number in range(len(counts))]
        least = drafted.other_tokens + len(counts)
        most = least + min(drafted.budget, sum(limits))
        if least >= most:
            return counts
        drafting = costs.draft.at(sum(1 for chances in drafted.acceptance if chances))
        # Between points cost is linear, and the rate highest at one of them.
        ends = [*(number for number, _ in costs.verify.points if least < number < most), most]
        seconds = [drafting + costs.verify.at(end) for end in ends]
        slots = [(-drafted.acceptance[number][0], 0, number) for number, limit in enumerate(limits) if limit > 0]
        heapify(slots)
        expected = float(len(counts))
        for tokens in range(least, most):
            rate = expected / (drafting + costs.verify.at(tokens))
            survival, position, number = slots[0]
            ahead = range(bisect_right(ends, tokens), len(ends))
            if not any((expected - survival * (ends[at] - tokens)) / seconds[at] > rate for at in ahead):
                break
            expected -= survival
            counts[number] = position + 1
            if position + 1 < limits[number]:
                heapreplace(slots, (survival * drafted.acceptance[number][position + 1], position + 1, number))
            else:
                heappop(slots)
        return counts


POLICIES: dict[str, type[DraftPolicy]] = {"all": VerifyAll, "adaptive": Adaptive}
"""Draft policies by the name used in the configuration."""
