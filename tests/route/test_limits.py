"""Admission bounds the queue in requests and in tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.ids import Rank
from rackserve.route.cost import Candidate
from rackserve.route.limits import Refusal, admissible, is_full, no_room
from rackserve.route.load import LoadBook
from rackserve.route.placement import RouterConfig

RANKS = (Rank("prefill0"), Rank("prefill1"))


def candidates(load: LoadBook, own: int) -> list[Candidate]:
    return [Candidate(rank, 0, 0, own, *load.booked(rank)) for rank in RANKS]


def admitted(config: RouterConfig, own: int, tries: int) -> int:
    load = LoadBook()
    for number in range(tries):
        room = admissible(config, candidates(load, own))
        if room:
            load.book(room[0].rank, (f"r{number}", 1), own)
    return sum(load.booked(rank)[1] for rank in RANKS)


def test_each_rank_takes_as_many_requests_as_the_limit() -> None:
    assert admitted(RouterConfig(max_queued_requests_per_rank=4), own=10, tries=20) == 8


def test_each_rank_takes_as_many_tokens_as_the_limit() -> None:
    assert admitted(RouterConfig(max_queued_tokens_per_rank=1000), own=300, tries=20) == 6


def test_zero_is_no_limit() -> None:
    assert admitted(RouterConfig(), own=10**6, tries=20) == 20


def test_an_idle_rank_takes_a_prompt_longer_than_the_limit_but_not_two() -> None:
    assert admitted(RouterConfig(max_queued_tokens_per_rank=1000), own=5000, tries=20) == 2


def test_room_comes_back_when_work_is_done() -> None:
    config, load = RouterConfig(max_queued_tokens_per_rank=100), LoadBook()
    for rank in RANKS:
        load.book(rank, ("a", 1), 100)
    assert admissible(config, candidates(load, 1)) == []
    refusal = no_room(config, candidates(load, 1))
    assert refusal.code == "overloaded" and "max_queued_tokens_per_rank = 100" in refusal.detail
    load.progress(RANKS[1], ("a", 1), 1)
    assert [c.rank for c in admissible(config, candidates(load, 1))] == [RANKS[1]]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=3), st.integers(0, 3), st.integers(0, 9))
def test_a_rack_is_full_exactly_when_the_smallest_request_finds_no_room(
    booked: list[tuple[int, int]], requests: int, tokens: int
) -> None:
    config = RouterConfig(max_queued_requests_per_rank=requests, max_queued_tokens_per_rank=tokens)
    smallest = [Candidate(RANKS[0], 0, 0, 1, work, number) for work, number in booked]
    assert is_full(config, booked) == (bool(booked) and not admissible(config, smallest))


def test_no_rank_at_all_is_said_to_be_so() -> None:
    assert no_room(RouterConfig(), []) == Refusal("unavailable", "no prefill rank is up")
    assert no_room(RouterConfig(), [], "worker").detail == "no worker is up"
