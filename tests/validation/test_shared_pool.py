from __future__ import annotations

import pytest

from rackserve.bench.session import requests_of
from rackserve.validation.shared_pool import PoolRun, pool_trials, run_pool, twin_sessions


def test_sessions_share_their_beginning_and_grow_by_new_tokens_and_answers() -> None:
    first, second = twin_sessions(2, turns=3)
    prompts = [[list(memoryview(entry.hash_ids).cast("i")) for entry in requests_of(each.entries)] for each in (first, second)]
    assert prompts[0][0][:312] == prompts[1][0][:312] == list(range(312))
    assert not set(prompts[0][2][312:]) & set(prompts[1][2][312:])
    assert prompts[0][1][: len(prompts[0][0])] == prompts[0][0]
    assert [entry.input_tokens for entry in requests_of(first.entries)] == [30_000, 32_948, 35_896]


def test_a_pool_keeps_hits_where_round_robin_alone_loses_them() -> None:
    kept, lost = (run_pool(4, pool=pool, turns=5, sessions_each=6) for pool in (True, False))
    assert kept.hit_rate > lost.hit_rate + 0.1
    assert kept.gpus == 48 and kept.ttft_p50_s < lost.ttft_p50_s


def test_throughput_grows_with_the_rack() -> None:
    one, two = (run_pool(units, turns=4, sessions_each=8) for units in (1, 2))
    assert two.output_per_s == pytest.approx(2 * one.output_per_s, rel=0.15)


def test_trials_name_their_assumptions(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(units: int, *, pool: bool = True) -> PoolRun:
        return run_pool(units, pool=pool, turns=2, sessions_each=2)

    monkeypatch.setattr("rackserve.validation.shared_pool.run_pool", small)
    hits, scaling, gains = pool_trials((1, 2))
    assert [len(trial.rows) for trial in (hits, scaling, gains)] == [2, 1, 5]
    assert "assumed" in hits.setup
