"""Fetch or compute: the sum, exactly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError
from rackserve.base.units import NS_PER_MS
from rackserve.pool.planner import FetchRates, plan_fetch

# 10 tokens a millisecond; 2 blocks a millisecond after 1 ms
RATES = FetchRates(prefill_tokens_per_s=10_000, fetch_bytes_per_s=2_000_000, block_bytes=1000, latency_ns=NS_PER_MS)


def test_a_fetch_that_is_faster_than_computing_is_made() -> None:
    assert plan_fetch(0, 10, 16, RATES) == 10  # 6 ms against 16 ms


def test_nothing_is_fetched_that_is_at_hand() -> None:
    assert plan_fetch(7, 10, 16, RATES) == 3
    assert plan_fetch(10, 10, 16, RATES) == 0
    assert plan_fetch(12, 10, 16, RATES) == 0


def test_latency_decides_short_fetches() -> None:
    assert plan_fetch(0, 1, 16, RATES) == 1  # 1.5 ms against 1.6 ms
    assert plan_fetch(0, 1, 15, RATES) == 0  # a draw: what is computed needs no network


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 64), st.integers(0, 20))
def test_no_number_of_blocks_would_be_faster(local: int, pool: int, block_tokens: int, latency_ms: int) -> None:
    rates = FetchRates(10_000, 2_000_000, 1000, latency_ms * NS_PER_MS)
    missing = max(pool - local, 0)

    def takes(fetched: int) -> int:
        return (rates.fetch_ns(fetched) if fetched else 0) + rates.compute_ns((missing - fetched) * block_tokens)

    assert takes(plan_fetch(local, pool, block_tokens, rates)) == min(takes(fetched) for fetched in range(missing + 1))


def test_a_rate_of_zero_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"rates.fetch_bytes_per_s must be positive"):
        FetchRates(10_000, 0, 1000, 0)


def test_what_is_computed_again_anyway_is_not_saved_by_a_fetch() -> None:
    assert plan_fetch(0, 2, 16, RATES, replay_tokens=16) == 0  # 2 ms against the 1.6 ms that it saves
    assert plan_fetch(0, 10, 16, RATES, replay_tokens=16) == 10
    assert plan_fetch(0, 3, 16, RATES, replay_tokens=48) == plan_fetch(0, 3, 16, RATES, replay_tokens=1000) == 0
    assert plan_fetch(7, 10, 16, RATES, replay_tokens=16) == plan_fetch(7, 10, 16, RATES)  # the same part either way
