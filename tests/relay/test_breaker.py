"""A worker that fails is left alone for a while, and tries again are a share of all requests."""

from __future__ import annotations

from rackserve.relay.breaker import Breaker, RetryBudget


def opened() -> Breaker:
    breaker = Breaker(3, 10.0, 5.0)
    for now in (0.0, 1.0, 2.0):
        breaker.failed(now)
    return breaker


def test_enough_failures_within_the_window_open_the_circuit() -> None:
    breaker = Breaker(3, 10.0, 5.0)
    for now in (0.0, 8.0, 16.0):
        breaker.failed(now)
    assert breaker.state == "closed"
    breaker.failed(17.0)
    assert breaker.state == "open"
    assert not breaker.allows(21.9)


def test_a_success_between_starts_the_count_anew() -> None:
    breaker = Breaker(2, 10.0, 5.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(1.0)
    assert breaker.state == "closed"


def test_after_its_rest_one_request_may_try_and_its_success_closes() -> None:
    breaker = opened()
    assert breaker.allows(7.0)
    breaker.sent()
    assert breaker.state == "half_open"
    assert not breaker.allows(7.0)
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allows(7.0)


def test_a_failed_try_opens_it_for_another_rest() -> None:
    breaker = opened()
    breaker.sent()
    breaker.failed(7.0)
    assert not breaker.allows(11.9)
    assert breaker.allows(12.0)


def test_a_try_without_a_verdict_lets_another_try() -> None:
    breaker = opened()
    breaker.sent()
    breaker.gave_up()
    assert breaker.allows(8.0)


def test_an_answer_to_a_request_of_before_closes_nothing() -> None:
    breaker = opened()
    breaker.succeeded()
    assert breaker.state == "open"


def test_tries_again_are_a_share_of_requests_beyond_the_first_few() -> None:
    budget = RetryBudget(0.25)
    assert sum(budget.spend() for _ in range(100)) == 10
    for _ in range(40):
        budget.earn()
    assert sum(budget.spend() for _ in range(100)) == 10
