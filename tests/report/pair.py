"""Two curves with known multiples: 2.71 at peak, 58.6 at 387 tok/s/user, where the old one falls off."""

from __future__ import annotations

from collections.abc import Sequence

from rackserve.bench.frontier import Curve, OperatingPoint


def curve(name: str, pairs: Sequence[tuple[float, float]]) -> Curve:
    """A curve of (interactivity, tokens/s per GPU) points of one configuration."""
    return Curve(name, tuple(OperatingPoint("x", 1, x, y) for x, y in pairs))


NEW = Curve(
    "new",
    (
        OperatingPoint("wide", 34_000, 120, 2.52e6),
        OperatingPoint("wide", 20_000, 387, 1.7e6),
        OperatingPoint("one tray", 1, 1_810, 900),
    ),
)
OLD = Curve(
    "old",
    (
        OperatingPoint("wide", 12_000, 100, 0.93e6),
        OperatingPoint("wide", 6_000, 300, 0.4e6),
        OperatingPoint("narrow", 300, 375, 0.12e6),
        OperatingPoint("narrow", 86, 387, 0.029e6),
        OperatingPoint("narrow", 20, 392, 0.005e6),
    ),
)
