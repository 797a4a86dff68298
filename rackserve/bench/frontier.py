"""Operating points and the curve they span."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rackserve.bench.metrics import Summary


class OperatingPoint(msgspec.Struct, frozen=True):
    """What a rack gave at one concurrency.

    interactivity   tokens/s/user as 1 / p90(time per output token), the slow tail
    per_gpu         total throughput per GPU, cached input included; `output_per_gpu`, `uncached_per_gpu` are two of its parts
    """

    label: str
    concurrency: int
    interactivity: float
    per_gpu: float
    uncached_per_gpu: float
    output_per_gpu: float


def operating_point(summary: Summary) -> OperatingPoint | None:
    """The point of one run; None if no answer gave a time per token."""
    if summary.interactivity_p90 is None:
        return None
    part = summary.throughput_per_gpu
    return OperatingPoint(
        summary.run.label,
        summary.run.concurrency,
        summary.interactivity_p90,
        part.total_with_cached_input,
        part.uncached_input,
        part.output,
    )


def frontier(points: Iterable[OperatingPoint]) -> tuple[OperatingPoint, ...]:
    """The points no other beats in both interactivity and throughput per GPU, by rising interactivity."""
    best: list[OperatingPoint] = []
    for point in sorted(points, key=lambda p: (-p.interactivity, -p.per_gpu)):
        if not best or point.per_gpu > best[-1].per_gpu:
            best.append(point)
    return tuple(reversed(best))
