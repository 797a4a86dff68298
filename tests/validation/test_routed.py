from __future__ import annotations

import pytest

from rackserve.base.keys import count
from rackserve.validation.routed import CUSTOMERS, QUESTIONS, customer_chains, rate_trial, routed_trials, stage


def test_questions_of_a_customer_share_the_prompt_and_nothing_else() -> None:
    chains = customer_chains()
    assert len(set(chains)) == CUSTOMERS * QUESTIONS
    first, second, other = chains[0], chains[1], chains[QUESTIONS]
    assert count(first) == 450
    assert first[: 375 * 16] == second[: 375 * 16] and first[375 * 16 : 376 * 16] != second[375 * 16 : 376 * 16]
    assert first[:16] != other[:16]


def test_a_stage_has_its_rate_and_its_length() -> None:
    asked = list(stage(50.0, 100.0, 7, customer_chains(), 40.0))
    assert len(asked) == pytest.approx(2_000, rel=0.1)
    assert all(100 <= at < 140 for at, _ in asked) and [ask.number for _, ask in asked[:2]] == [7, 8]


def test_prefill_rates_come_in_the_measured_order_of_models() -> None:
    rows = {row.what: row.ours for row in rate_trial().rows}
    assert rows["gpt-oss-120b, H100"] > rows["Qwen3-32B, 2 H100, vLLM"]


def test_least_uncached_work_carries_more_than_round_robin() -> None:
    trials = {trial.name: trial for trial in routed_trials((5.0, 25.0), 5.0)}
    given = trials["knee of routing, prefill rate as measured by them (input)"]
    knees = [row.ours for row in given.rows[:2]]
    assert knees[1] >= knees[0] > 0
    assert trials["memory for KV"].rows[0].error == pytest.approx(0, abs=0.05)
