from __future__ import annotations

import pytest

from rackserve.base.costs import StepCost
from rackserve.base.errors import ConfigError
from rackserve.base.events import Event, StepDone
from rackserve.base.ids import Rank
from rackserve.base.rng import Stream
from rackserve.bench.calibrate import calibrate, fit_steps
from rackserve.bench.records import recorded

TRUTH = StepCost(2_000_000, 50_000, 30, 100_000, 200)


def steps(cost: StepCost, count: int, noise: float = 0.0, worker: str = "prefill0") -> list[StepDone]:
    draws = Stream("steps", worker)
    made = []
    for number in range(count):
        tokens, sequences, context = draws.between(1, 256), draws.between(1, 8), draws.between(0, 2000)
        attended = tokens * context + draws.between(0, 30_000)
        exact = cost.duration_ns(tokens, attended, sequences, context)
        duration = round(exact * (1 + noise * (2 * draws.unit() - 1)))
        made.append(StepDone(Rank(worker), number, tokens, context, attended, sequences, 1, duration))
    return made


def test_a_linear_step_time_is_found_exactly() -> None:
    fit = fit_steps(steps(TRUTH, 60))
    found = (fit.base_ns, fit.per_token_ns, fit.per_attended_ns, fit.per_sequence_ns, fit.per_context_token_ns)
    assert found == pytest.approx((2_000_000, 50_000, 30, 100_000, 200), rel=1e-3)
    assert fit.num_steps == 30
    assert fit.held_out_error is not None
    assert fit.held_out_error < 1e-6


def test_the_error_is_measured_on_steps_that_were_not_fitted() -> None:
    fit = fit_steps(steps(TRUTH, 200, noise=0.2))
    assert fit.held_out_error is not None
    assert fit.held_out_error_p90 is not None
    assert 0.05 < fit.held_out_error < 0.15 < fit.held_out_error_p90 < 0.25
    spoiled = [s if n % 2 == 0 else StepDone(s.rank, s.number, 1, 0, 0, 1, 1, 10**12) for n, s in enumerate(steps(TRUTH, 60))]
    assert fit_steps(spoiled).held_out_error == pytest.approx(1, abs=0.01)


def test_no_price_is_negative() -> None:
    falling = [StepDone(Rank("decode0"), n, n + 1, 0, 0, n + 1, n + 1, 1_000_000 - 9_000 * n) for n in range(40)]
    fit = fit_steps(falling)
    assert min(fit.base_ns, fit.per_token_ns, fit.per_attended_ns, fit.per_sequence_ns, fit.per_context_token_ns) == 0
    assert fit.base_ns > 0


def test_collinear_counts_still_give_a_model() -> None:
    decode = [
        StepDone(Rank("decode0"), n, b, 100 * b, 101 * b, b, b, 3_000_000 + 70_000 * b) for n, b in enumerate([1, 2, 3, 4] * 5)
    ]
    fit = fit_steps(decode)
    assert fit.duration_ns(8, 808, 8, 800) == pytest.approx(3_560_000, rel=1e-3)


def test_roles_are_fitted_apart_and_a_group_step_counts_once_with_its_largest_rank() -> None:
    decode = StepCost(1_000_000, 0, 0, 300_000, 0)
    events: list[Event] = [*steps(TRUTH, 40), *steps(decode, 40, worker="decode0"), *steps(TRUTH, 3, worker="other0")]
    for step in steps(TRUTH, 40):
        events.append(StepDone(Rank("prefill0", 1), step.number, 1, 0, 0, 1, 0, step.duration_ns))
        events.append(StepDone(Rank("prefill0", 2), step.number, 0, 0, 0, 0, 0, step.duration_ns, dummy=True))
    costs = calibrate(recorded((0, "x", event) for event in events))
    assert list(costs) == ["decode", "prefill"], "a role with too few steps is not calibrated"
    assert costs["prefill"].num_steps == 20
    assert costs["prefill"].per_token_ns == pytest.approx(50_000, rel=1e-3)
    assert costs["decode"].per_sequence_ns == pytest.approx(300_000, rel=1e-3)


def test_too_few_steps_are_an_error_that_says_how_many_are_needed() -> None:
    with pytest.raises(ConfigError, match="at least 10 recorded steps, got 3"):
        fit_steps(steps(TRUTH, 3))


def test_runs_that_number_their_steps_alike_are_not_taken_for_one() -> None:
    runs = [recorded((0, "x", event) for event in steps(TRUTH, 40)) for _ in range(2)]
    assert calibrate(*runs)["prefill"].num_steps == 2 * calibrate(runs[0])["prefill"].num_steps
