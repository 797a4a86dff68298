"""Policies one by one: what each may and may not do."""

from __future__ import annotations

import math

import msgspec
import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.ids import Rank
from rackserve.route.cost import Candidate
from rackserve.route.placement import POLICIES, DecodeCandidate, RouterConfig, SessionAffinity, place_decode

RANKS = (Rank("prefill0", 0), Rank("prefill0", 1), Rank("prefill1", 0), Rank("prefill2", 0))
NO_SESSION = ""


def candidate(rank: Rank, own: int = 100, queued: int = 0, num_queued: int = 0) -> Candidate:
    return Candidate(rank, 0, 0, own, queued, num_queued)


IDLE = [candidate(rank) for rank in RANKS]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_spreads_equal_work_over_idle_ranks_in_turn(name: str) -> None:
    policy = POLICIES[name]()
    assert [policy.place(NO_SESSION, IDLE).rank for _ in range(8)] == [*RANKS, *RANKS]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_among_the_candidates_left(name: str) -> None:
    policy = POLICIES[name]()
    for number in range(12):
        left = IDLE[number % 4 :][:2]
        assert policy.place(f"s{number % 3}", left) in left


def test_round_robin_goes_on_after_a_rank_has_left() -> None:
    policy = POLICIES["round_robin"]()
    assert policy.place(NO_SESSION, IDLE).rank == RANKS[0]
    assert policy.place(NO_SESSION, IDLE[2:]).rank == RANKS[2]
    assert policy.place(NO_SESSION, IDLE).rank == RANKS[3]
    assert policy.place(NO_SESSION, IDLE).rank == RANKS[0]


def test_least_load_looks_at_queued_tokens_then_at_queued_attempts() -> None:
    policy = POLICIES["least_load"]()
    ranks = [candidate(RANKS[0], queued=5), candidate(RANKS[1], own=999, queued=4, num_queued=2), candidate(RANKS[2], 1, 4, 3)]
    assert policy.place(NO_SESSION, ranks).rank == RANKS[1]


def test_least_uncached_work_takes_the_least_cost_and_of_those_the_shortest_queue() -> None:
    policy = POLICIES["least_uncached_work"]()
    ranks = [candidate(RANKS[0], own=20, queued=80), candidate(RANKS[1], own=70, queued=30), candidate(RANKS[2], own=101)]
    assert policy.place(NO_SESSION, ranks).rank == RANKS[1]


def test_a_session_stays_and_new_ones_go_where_fewest_are() -> None:
    policy = SessionAffinity()
    homes = {f"s{n}": policy.place(f"s{n}", IDLE).rank for n in range(8)}
    assert sorted(homes.values()) == sorted([*RANKS, *RANKS])
    busy = [candidate(rank, queued=1000 * n) for n, rank in enumerate(reversed(RANKS))]
    assert {s: policy.place(s, busy).rank for s in homes} == homes


def test_a_session_survives_the_loss_of_its_rank() -> None:
    policy = SessionAffinity()
    home = policy.place("s", IDLE).rank
    left = [c for c in IDLE if c.rank != home]
    moved = policy.place("s", left).rank
    assert moved != home
    assert policy.place("s", IDLE).rank == moved
    assert policy._num_sessions == {moved: 1}


def test_the_session_map_is_bounded_and_forgets_the_one_unseen_longest() -> None:
    policy = SessionAffinity(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        policy.place(name, IDLE)
    assert list(policy._homes) == ["a", "c"] and sum(policy._num_sessions.values()) == 2


def test_decode_goes_to_the_least_context_that_has_room() -> None:
    ranks = [DecodeCandidate(RANKS[0], 1000, 950), DecodeCandidate(RANKS[1], 5000, 4000), DecodeCandidate(RANKS[2], 5000, 4500)]
    assert place_decode(100, ranks) == ranks[1]
    assert place_decode(50, ranks) == ranks[0]
    assert place_decode(1001, ranks) is None
    assert place_decode(1, []) is None


def test_context_cached_on_a_decode_rank_counts_as_saved() -> None:
    cold, warm = DecodeCandidate(RANKS[0], 1000, 500), DecodeCandidate(RANKS[1], 1000, 700, cached_tokens=300)
    assert place_decode(400, [cold, warm]) == warm
    assert place_decode(550, [cold, warm]) == warm  # the cold one would have no room at all


def test_unknown_or_impossible_settings_are_errors_that_name_the_field() -> None:
    with pytest.raises(ConfigError, match=r"router.policy 'best' is unknown; choose one of .*least_load"):
        RouterConfig(policy="best")
    with pytest.raises(ConfigError, match=r"router.fetch_cost"):
        RouterConfig(fetch_cost=-0.1)
    for wrong in (math.nan, math.inf, 1e10):
        with pytest.raises(ConfigError, match=r"router.fetch_cost must be at"):
            RouterConfig(fetch_cost=wrong)
    with pytest.raises(ConfigError, match=r"router.max_queued_requests_per_rank must be at most"):
        RouterConfig(max_queued_requests_per_rank=10**30)
    with pytest.raises(ConfigError, match=r"router.max_queued_tokens_per_rank"):
        RouterConfig(max_queued_tokens_per_rank=-1)
    with pytest.raises(ConfigError, match=r"router.max_index_runs"):
        RouterConfig(max_index_runs=0)
    with pytest.raises(msgspec.ValidationError, match="polcy"):
        msgspec.convert({"polcy": "round_robin"}, RouterConfig)
