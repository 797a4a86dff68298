"""What follows if coefficients are off: every group of them a little smaller and larger, and whether the choice changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rackserve.bench.frontier import Band, OperatingPoint
from rackserve.report.curves import Line
from rackserve.simulated_rack import FACTORS, SimulatedSetup
from rackserve.whatif.grid import Variant
from rackserve.whatif.points import PointResult, curves_of, point_of, scaled_by
from rackserve.whatif.runs import ResultRow

STEPS = (0.8, 0.9, 1.1, 1.2)
"""Factors by which each group of coefficients is taken to be off."""

CLOSE = 0.02
"""Two configurations whose scores lie no further apart than this are as good as each other."""


class Choice(msgspec.Struct, frozen=True):
    """The best configuration at a speed.

    score   throughput per GPU, or completed requests per second and GPU
    lead    its score over that of the next; None: no other is fast enough
    """

    label: str
    score: float
    runner_up: str = ""
    lead: float | None = None

    @property
    def is_close(self) -> bool:
        """Whether the next is as good."""
        return self.lead is not None and self.lead <= 1 + CLOSE


class Variation(msgspec.Struct, frozen=True):
    """The choice if one group of coefficients is `factor` times what it is taken to be; None: nothing is fast enough.

    flips   the configuration that was best is no longer as good as the best
    """

    group: str
    factor: float
    choice: Choice | None
    flips: bool


def choose(results: Sequence[PointResult], floor: float, by_cost: bool = False) -> Choice | None:
    """The configuration with the highest throughput per GPU at `floor` tokens/s/user; None if none is so fast.

    by_cost: with the most completed requests per GPU instead, which are the cheapest at any price of a GPU.
    """

    ranked = sorted(_scores(results, floor, by_cost).items(), key=lambda pair: -pair[1])
    if not ranked:
        return None
    (label, score), rest = ranked[0], ranked[1:]
    return Choice(label, score, rest[0][0], score / rest[0][1]) if rest else Choice(label, score)


def _scores(results: Sequence[PointResult], floor: float, by_cost: bool) -> dict[str, float]:
    """By configuration, those that are fast enough."""

    def work(point: OperatingPoint) -> float | None:
        return point.requests_per_gpu if by_cost else point.per_gpu

    scores = {}
    for label in dict.fromkeys(result.variant.label for result in results):
        for curve in curves_of([result for result in results if result.variant.label == label]):
            score = Line(curve).figure_at(floor, work)
            if score is not None:
                scores[label] = score
    return scores


def varied_setups(variants: Sequence[Variant]) -> list[SimulatedSetup]:
    """The set-ups that a sensitivity analysis runs beside the grid's own."""
    return [
        scaled_by(variant.setup, group, factor) for group in FACTORS for factor in STEPS for variant in variants
    ]  # fmt: skip


def analyse(
    variants: Sequence[Variant], rows: Mapping[SimulatedSetup, ResultRow], floor: float, by_cost: bool = False
) -> tuple[Choice | None, tuple[Variation, ...], dict[SimulatedSetup, Band]]:
    """(the choice as things are taken to be, each variation's, where each set-up's point lies over all of them).

    One seed each, that of the set-up. A set-up without a point in some variation has no band.
    """
    base = [point_of(variant, rows, 1, intervals=False) for variant in variants]
    chosen = choose(base, floor, by_cost)
    points: dict[SimulatedSetup, list[OperatingPoint | None]] = {
        variant.setup: [result.point] for variant, result in zip(variants, base, strict=True)
    }
    found = []
    for group in FACTORS:
        for factor in STEPS:
            moved = [Variant(variant.label, scaled_by(variant.setup, group, factor)) for variant in variants]
            results = [point_of(variant, rows, 1, intervals=False) for variant in moved]
            choice = choose(results, floor, by_cost)
            before = _scores(results, floor, by_cost).get(chosen.label) if chosen else None
            if chosen is None:
                flips = choice is not None
            else:
                flips = before is None or choice is None or choice.score > before * (1 + CLOSE)
            found.append(Variation(group, factor, choice, flips))
            for variant, result in zip(variants, results, strict=True):
                points[variant.setup].append(result.point)
    bands = {}
    for setup, each in points.items():
        known = [point for point in each if point is not None]
        if len(known) == len(each):
            speeds, rates = [point.interactivity for point in known], [point.per_gpu for point in known]
            bands[setup] = Band((min(speeds), max(speeds)), (min(rates), max(rates)))
    return chosen, tuple(found), bands
