"""A step model as straight lines: what a closed form or a `StepCost` needs, with the error of doing so."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from rackserve.base.costs import StepCost
from rackserve.base.units import NS_PER_S
from rackserve.sim.cost.load import StepLoad, decode_load, prefill_load
from rackserve.sim.cost.step_model import StepModel

STEP = 0.05
"""Relative distance at which slopes are taken."""


class Plane(msgspec.Struct, frozen=True):
    """Decode step time that is linear in the rank's sequences and in the sum of their contexts. Nanoseconds, none below 0."""

    base_ns: float
    per_sequence_ns: float
    per_context_token_ns: float

    def seconds(self, num_sequences: float, context_tokens: float) -> float:
        """Duration of a decode step."""
        return (self.base_ns + self.per_sequence_ns * num_sequences + self.per_context_token_ns * context_tokens) / NS_PER_S


def decode_plane(model: StepModel, num_sequences: float, context: float, per_sequence: int) -> Plane:
    """The plane that touches the model at `num_sequences` sequences per rank of `context` positions each.

    per_sequence: positions that a sequence computes in a step, 1 plus the drafts to verify.
    """

    def at(sequences: float, tokens: float) -> float:
        return model.seconds([decode_load(sequences, tokens, per_sequence)]) * NS_PER_S

    tokens = num_sequences * context
    by_sequence = _slope(lambda x: at(x, tokens), num_sequences)
    by_context = _slope(lambda x: at(num_sequences, x), tokens)
    base = at(num_sequences, tokens) - by_sequence * num_sequences - by_context * tokens
    return Plane(max(0.0, base), by_sequence, by_context)


def plane_error(model: StepModel, plane: Plane, per_sequence: int, points: Iterable[tuple[float, float]]) -> float:
    """Largest |plane / model - 1| over points (sequences per rank, context of each)."""
    errors = (
        abs(plane.seconds(count, count * context) / model.seconds([decode_load(count, count * context, per_sequence)]) - 1)
        for count, context in points
    )
    return max(errors)


def decode_cost(model: StepModel, num_sequences: float, context: float, per_sequence: int) -> StepCost:
    """`decode_plane` as step costs of a decode rank."""
    plane = decode_plane(model, num_sequences, context, per_sequence)
    return StepCost(plane.base_ns, 0.0, 0.0, plane.per_sequence_ns, plane.per_context_token_ns)


def prefill_cost(model: StepModel, tokens: float, start: float, tail: float | None = None) -> StepCost:
    """Step costs of a prefill rank that touch the model at a chunk of `tokens` after `start` positions.

    `tail` of its positions pass every layer, at any size of the chunk (None: all of them).
    """
    spot = prefill_load(tokens, start, tail)

    def at(count: float, attended: float) -> float:
        grown = StepLoad(1, count, count if tail is None else tail, start, attended)
        return model.seconds([grown]) * NS_PER_S

    by_token = _slope(lambda x: at(x, spot.attended), tokens)
    by_pair = _slope(lambda x: at(tokens, x), spot.attended)
    base = at(tokens, spot.attended) - by_token * tokens - by_pair * spot.attended
    return StepCost(max(0.0, base), by_token, by_pair, 0.0, 0.0)


def _slope(function: Callable[[float], float], at: float) -> float:
    """Slope of `function` around `at`, not below 0."""
    low, high = at * (1 - STEP), at * (1 + STEP)
    return max(0.0, (function(high) - function(low)) / (high - low)) if high > low else 0.0
