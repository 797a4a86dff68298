"""Fits the step-time model of each role to recorded steps, and says how far off it is on steps it has not seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import msgspec

from rackserve.base.costs import StepCost
from rackserve.base.errors import ConfigError
from rackserve.base.events import StepDone
from rackserve.bench.metrics import percentile
from rackserve.bench.rack import role_of
from rackserve.bench.records import RecordedEvent

MIN_STEPS = 10
"""Fewer steps than this (half of them are held out) give no model."""

_Row = tuple[float, ...]


def steps_of(recorded: Iterable[RecordedEvent]) -> dict[str, list[StepDone]]:
    """Finished steps by role, one per group step: the rank with the most work, since the group ends with its slowest rank."""
    groups: dict[tuple[str, int], StepDone] = {}
    for item in recorded:
        step = item.event
        if isinstance(step, StepDone) and not step.dummy and step.new_tokens > 0:
            key = (step.rank.worker, step.number)
            before = groups.get(key)
            if before is None or (step.new_tokens, step.attended) > (before.new_tokens, before.attended):
                groups[key] = step
    roles: dict[str, list[StepDone]] = {}
    for (worker, _), step in groups.items():
        roles.setdefault(role_of(worker), []).append(step)
    return roles


def calibrate(*runs: Iterable[RecordedEvent]) -> dict[str, StepCost]:
    """A fitted `StepCost` per role that ran at least `MIN_STEPS` steps over all `runs` (each numbers its steps from 1)."""
    roles: dict[str, list[StepDone]] = {}
    for run in runs:
        for role, steps in steps_of(run).items():
            roles.setdefault(role, []).extend(steps)
    return {role: fit_steps(steps) for role, steps in sorted(roles.items()) if len(steps) >= MIN_STEPS}


def fit_steps(steps: Sequence[StepDone]) -> StepCost:
    """Fit every second step by least squares of the relative error, with no price below 0; test on the others."""
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"calibration needs at least {MIN_STEPS} recorded steps, got {len(steps)}; run longer")
    fitted, held_out = steps[::2], steps[1::2]
    base, token, attended, sequence, context = _non_negative_least_squares([_row(step) for step in fitted])
    cost = StepCost(base, token, attended, sequence, context, len(fitted))
    errors = sorted(relative_error(cost, step) for step in held_out)
    return msgspec.structs.replace(cost, held_out_error=percentile(errors, 0.5), held_out_error_p90=percentile(errors, 0.9))


def relative_error(cost: StepCost, step: StepDone) -> float:
    """|predicted - measured| / measured duration of one step."""
    predicted = cost.duration_ns(step.new_tokens, step.attended, step.num_sequences, step.context_tokens)
    return abs(predicted - step.duration_ns) / max(1, step.duration_ns)


def _row(step: StepDone) -> _Row:
    """What the step did, over its duration: prices times this row should give 1."""
    counts = (1, step.new_tokens, step.attended, step.num_sequences, step.context_tokens)
    return tuple(value / max(1, step.duration_ns) for value in counts)


def _non_negative_least_squares(rows: Sequence[_Row]) -> list[float]:
    """Prices x >= 0 that minimise the sum over rows of (row . x - 1)^2.

    The minimum leaves some prices at 0 and is an ordinary least-squares fit of the others, so all sets of the others are
    tried (32 for five prices). Of sets that fit equally well the smallest wins, which settles collinear columns.
    """
    width = len(rows[0])
    lengths = [sum(row[i] ** 2 for row in rows) ** 0.5 or 1.0 for i in range(width)]
    scaled = [[row[i] / lengths[i] for i in range(width)] for row in rows]
    gram = [[sum(row[i] * row[j] for row in scaled) for j in range(width)] for i in range(width)]
    target = [sum(row[i] for row in scaled) for i in range(width)]
    best, best_gain = [0.0] * width, 0.0
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            x = _solve([[gram[i][j] for j in chosen] for i in chosen], [target[i] for i in chosen])
            if x is None or min(x) < 0:
                continue
            gain = sum(value * target[i] for value, i in zip(x, chosen, strict=True))  # what the fit takes off the residual
            if gain > best_gain + 1e-9 * len(rows):
                best, best_gain = [0.0] * width, gain
                for value, i in zip(x, chosen, strict=True):
                    best[i] = value / lengths[i]
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small symmetric system by elimination with pivoting; None if it is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(len(rows)):
        pivot = max(range(column, len(rows)), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) < 1e-10:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for other in range(len(rows)):
            if other != column:
                factor = rows[other][column] / rows[column][column]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[column], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]
