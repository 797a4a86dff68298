"""Which coefficients a step's time hangs on: the change of every term when one of them grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rackserve.sim.cost.kernels import Kernels
from rackserve.sim.cost.load import StepLoad
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.hardware import Mark, Value

GROWTH = 0.1
"""By how much a coefficient grows: this share of it, or this much where it is 0."""


class Change(msgspec.Struct, frozen=True):
    """What `GROWTH` of one coefficient does: seconds of the step, and of each term by name."""

    step: float
    terms: Mapping[str, float]


def scaled(kernels: Kernels, name: str, factor: float) -> Kernels:
    """`kernels` with coefficient `name` times `factor` (plus `factor` - 1 where it is 0)."""
    value: Value = getattr(kernels, name)
    number = value.get(name)
    grown = Value(number * factor if number else factor - 1, value.mark, value.source)
    return msgspec.structs.replace(kernels, **{name: grown})


def changes(model: StepModel, loads: Sequence[StepLoad]) -> dict[str, Change]:
    """What each coefficient that the step depends on does to it, the strongest first."""
    before, terms = model.seconds(loads), model.terms(loads)
    was = {term.name: term.seconds for term in terms}
    found = {}
    for name in dict.fromkeys(name for term in terms for name in term.coefficients):
        setup = msgspec.structs.replace(model.setup, kernels=scaled(model.setup.kernels, name, 1 + GROWTH))
        moved = StepModel(setup)
        now = {term.name: term.seconds - was.get(term.name, 0.0) for term in moved.terms(loads)}
        found[name] = Change(moved.seconds(loads) - before, now)
    return dict(sorted(found.items(), key=lambda item: -abs(item[1].step)))


def term_mark(term: str, found: Mapping[str, Change], kernels: Kernels) -> Mark:
    """How the coefficient is known that a term hangs on most; `published`, as chips' rates are, for one that needs none."""
    moving = {name: abs(change.terms.get(term, 0.0)) for name, change in found.items()}
    strongest = max(moving, key=lambda name: moving[name], default="")
    if not strongest or not moving[strongest]:
        return "published"
    value: Value = getattr(kernels, strongest)
    return value.mark
