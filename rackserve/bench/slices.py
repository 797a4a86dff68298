"""Tokens second by second: whether a run was steady, which its averages do not show."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackserve.base.units import NS_PER_S
from rackserve.bench.records import RequestRecord

MAX_SLICES = 10_000
"""A longer run gets longer slices, of whole seconds."""


class Slices(msgspec.Struct, frozen=True):
    """Tokens of requests that succeeded, by slices of `seconds` from the first sending on; all three rows are equally long.

    Input counts where the first output came, output where its chunks came, in equal parts: a chunk may hold several tokens.
    """

    seconds: int
    cached_input: tuple[float, ...]
    uncached_input: tuple[float, ...]
    output: tuple[float, ...]


def slices_of(done: Sequence[RequestRecord]) -> Slices | None:
    """The slices of a run from its successes; None if there are none."""
    answered = [record for record in done if record.first_ns >= 0]
    if not answered:
        return None
    zero = min(record.sent_ns for record in done)
    span_ns = max(record.last_ns for record in answered) - zero
    seconds = -(-(span_ns // NS_PER_S + 1) // MAX_SLICES)
    size = seconds * NS_PER_S
    cached, uncached, output = ([0.0] * (span_ns // size + 1) for _ in range(3))
    for record in answered:
        at = (record.first_ns - zero) // size
        cached[at] += record.cached_tokens
        uncached[at] += record.prompt_tokens - record.cached_tokens
        arrivals = record.chunk_ns or (record.last_ns,)
        part = record.output_tokens / len(arrivals)
        for arrival in arrivals:
            output[(arrival - zero) // size] += part
    return Slices(seconds, tuple(cached), tuple(uncached), tuple(output))
