"""The one cost: exact figures, and no cliff anywhere."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.ids import Rank
from rackserve.route.cost import Candidate, uncached_work

RANK = Rank("prefill0")


def weigh(prompt: int, local: int = 0, pool: int = 0, queued: int = 0, fetch_cost: float = 0.02) -> Candidate:
    return Candidate(RANK, *uncached_work(prompt, local, pool, fetch_cost), queued, 1)


def test_cost_is_queue_plus_uncached_plus_fetch() -> None:
    assert weigh(1000).cost == 1000
    assert weigh(1000, local=400, queued=50).cost == 650
    assert weigh(1000, local=400, pool=900, queued=50) == Candidate(RANK, 400, 500, 110, 50, 1)


def test_what_the_pool_has_of_the_local_prefix_is_not_fetched() -> None:
    assert weigh(1000, local=400, pool=300) == Candidate(RANK, 400, 0, 600, 0, 1)


def test_the_last_token_is_always_computed() -> None:
    assert weigh(1000, local=1000).own_tokens == 1
    assert weigh(1000, pool=1000, fetch_cost=0.0).own_tokens == 1


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(1, 2000), st.integers(0, 2000), st.integers(0, 2000), st.sampled_from([0.0, 0.02, 0.5, 1.0]))
def test_one_more_cached_token_saves_at_most_one_token_and_never_costs(prompt: int, local: int, pool: int, rate: float) -> None:
    own = weigh(prompt, local, pool, fetch_cost=rate).own_tokens
    assert 0 <= own - weigh(prompt, local + 1, pool, fetch_cost=rate).own_tokens <= 1
    assert 0 <= own - weigh(prompt, local, pool + 1, fetch_cost=rate).own_tokens <= 1
