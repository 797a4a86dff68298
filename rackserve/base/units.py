"""Time is an integer count of nanoseconds on some host's clock; floats appear only at the edges."""

from __future__ import annotations

Time = int

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

MIB = 1 << 20


def to_ns(seconds: float) -> Time:
    """Nearest whole number of nanoseconds in `seconds`."""
    return round(seconds * NS_PER_S)


def to_seconds(time_ns: Time) -> float:
    """`time_ns` as seconds."""
    return time_ns / NS_PER_S


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """How many blocks of `block_tokens` positions hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)
