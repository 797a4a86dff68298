"""Step times from tables that fill on demand: a few microseconds a step where the model itself takes a hundred."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from rackserve.base.step import GroupStep, Step
from rackserve.base.units import NS_PER_S, Time
from rackserve.sim.cost.load import StepLoad, decode_load, load_of
from rackserve.sim.cost.step_model import StepModel

COUNTS_PER_OCTAVE = 16
CONTEXTS_PER_OCTAVE = 4
EXACT = 64
"""Whole numbers up to this are entries of their own; above, so many entries lie between a number and its double."""

_Pair = tuple[float, float]
"""Seconds of a rank's own work, and of the experts that its group shares."""


class StepTimes:
    """Durations of a model's steps, between entries by straight lines. What a simulated engine asks for.

    Ranks of a group wait for the longest own work; the experts' is as long as their tokens' mean makes it.
    """

    __slots__ = ("_floor", "_main", "_model", "_prefill", "_tails")

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._prefill = model.setup.role == "prefill"
        self._floor = model.setup.prefill_floor_s if self._prefill else 0.0
        self._main: dict[tuple[int, float, float], _Pair] = {}
        self._tails: dict[tuple[int, int], _Pair] = {}

    def step_ns(self, step: Step) -> Time:
        """Duration of a rank's step as if the other ranks of its group had the same work."""
        return self._duration([step])

    def group_ns(self, step: GroupStep) -> Time:
        """Duration of a group's step, each rank with its own work."""
        return self._duration(step.steps)

    def _duration(self, steps: Sequence[Step]) -> Time:
        if not self._prefill and any(step.num_tokens > step.num_sequences for step in steps):
            # A sequence computes a part of its prompt: too rare for a table.
            return max(1, round(self._model.seconds([load_of(step) for step in steps]) * NS_PER_S))
        own = experts = total = 0.0
        for step in steps:
            each, count, context, alone, shared = self._rank(step)
            pair = self._at(each, count, context)
            own, experts, total = max(own, pair[0] + alone), experts + shared, total + each * count
        mean = total / len(steps)
        even = total == len(steps) * each * count
        experts = experts / len(steps) + (pair if even else self._at(1, mean, context))[1]
        seconds = max(own + experts, self._floor) if total else own + experts
        return max(1, round(seconds * NS_PER_S))

    def _rank(self, step: Step) -> tuple[float, float, float, float, float]:
        """What to look up (positions of each, how many, of what context), and what tails of prompts add: own work, experts'."""
        if not self._prefill:
            count = step.num_sequences
            drafts = sum(item.num_draft for item in step.items) + step.carried * step.carried_drafts
            return (1 + drafts / count, count, step.context_tokens / count, 0.0, 0.0) if count else (1, 0, 0.0, 0.0, 0.0)
        load = load_of(step)
        if not load.tail_tokens:
            return 1, load.tokens, load.mean_context, 0.0, 0.0
        key = (int(load.num_sequences), int(load.tail_tokens))
        if key not in self._tails:
            self._tails[key] = self._tail(load)
        return 1, load.tokens, load.mean_context, *self._tails[key]

    def _at(self, each: float, count: float, context: float) -> _Pair:
        whole = int(each)
        pair, more = self._between(whole, count, context), each - whole
        if not more:
            return pair
        above = self._between(whole + 1, count, context)
        return pair[0] + more * (above[0] - pair[0]), pair[1] + more * (above[1] - pair[1])

    def _tail(self, load: StepLoad) -> _Pair:
        """What the positions that pass all layers add to the others."""
        whole = self._pair(load)
        early = self._pair(StepLoad(1, load.tokens, 0, load.mean_context, load.attended))
        return whole[0] - early[0], whole[1] - early[1]

    def _between(self, each: int, count: float, context: float) -> _Pair:
        low, high, part = _around(count, COUNTS_PER_OCTAVE)
        left, right, share = _around(context, CONTEXTS_PER_OCTAVE)
        own = experts = 0.0
        for x, weight in ((low, 1 - part), (high, part)):
            for y, also in ((left, 1 - share), (right, share)):
                if weight and also:
                    pair = self._main.get((each, x, y)) or self._entry(each, x, y)
                    own += weight * also * pair[0]
                    experts += weight * also * pair[1]
        return own, experts

    def _entry(self, each: int, count: float, context: float) -> _Pair:
        if self._prefill:
            load = StepLoad(1 if count else 0, count, 0, context, count * context)
        else:
            load = decode_load(count, count * context, each)
        self._main[each, count, context] = pair = self._pair(load)
        return pair

    def _pair(self, load: StepLoad) -> _Pair:
        experts = total = 0.0
        for term in self._model.terms([load]):
            total += term.seconds
            experts += term.seconds if term.name == "experts" else 0.0
        return total - experts, experts


def _around(number: float, per_octave: int) -> tuple[float, float, float]:
    """The entries below and above `number`, and how far between them it lies."""
    if number < EXACT:
        low = float(int(number))
        return low, low + 1, number - low
    step = int(log2(number) * per_octave)
    low, high = 2 ** (step / per_octave), 2 ** ((step + 1) / per_octave)
    return low, high, min(1.0, max(0.0, (number - low) / (high - low)))
