"""Bounds of settings: what lies outside is a slip of the pen, and is refused before it overflows somewhere else."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rackserve.base.errors import ConfigError

MIN_SECONDS = 1e-6
"""Shortest wait: one of no length would never let time pass in simulation."""

MAX_SECONDS = 10_000_000
MIN_RATE = 1e-6
MAX_RATE = 10**15
MAX_COUNT = 2**31 - 1


def require_range(section: str, settings: msgspec.Struct, names: Iterable[str], least: float, most: float) -> None:
    """Raise ConfigError with `section.name` unless each named number is from `least` to `most`, both included; NaN is not."""
    for name in names:
        value = getattr(settings, name)
        if least <= value <= most:
            continue
        bound = f"at most {most}" if value > most else f"at least {least}"
        shown = "a number of more than 64 bits" if isinstance(value, int) and abs(value) >> 64 else value
        raise ConfigError(f"{section}.{name} must be {bound}, got {shown}")
