"""Orders, fairness and waiting for siblings."""

from __future__ import annotations

import pytest

from rackserve.sched.queue import ORDERS, FirstComeFirstServed, WaitingQueue, turns
from rackserve.sched.sequence import Sequence
from tests.sched.desk import sequence_of


def numbers(queue: WaitingQueue, fits: dict[int, bool | None]) -> list[int]:
    """Who is admitted in turn when each sequence answers as in `fits` (default: it fits)."""
    out = []
    while (picked := queue.pick(lambda sequence: fits.get(sequence.number, True))) is not None:
        out.append(picked.number)
    return out


def filled(order: str, lengths: list[int], max_skips: int = 16) -> WaitingQueue:
    queue = WaitingQueue(ORDERS[order](), max_skips)
    for number, length in enumerate(lengths, 1):
        queue.add(sequence_of(number, length))
    return queue


def test_first_come_is_first_served() -> None:
    assert numbers(filled("fcfs", [9, 1, 5]), {}) == [1, 2, 3]


def test_shorter_prompts_go_first_in_that_order() -> None:
    assert numbers(filled("shortest_first", [9, 1, 5, 1]), {}) == [2, 4, 3, 1]


def test_one_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    queue = filled("fcfs", [9, 1, 1, 1, 1], max_skips=2)
    assert numbers(queue, {1: False}) == [2, 3]
    assert len(queue) == 3
    assert numbers(queue, {}) == [1, 4, 5]


def test_without_skips_nobody_is_passed() -> None:
    assert numbers(filled("fcfs", [9, 1], max_skips=0), {1: False}) == []


def test_waiting_for_a_sibling_is_no_skip() -> None:
    queue = filled("fcfs", [9, 1, 1, 1, 1], max_skips=2)
    assert numbers(queue, {1: None}) == [2, 3, 4, 5]
    assert numbers(queue, {}) == [1]


@pytest.mark.parametrize("order", ORDERS)
def test_a_long_prompt_is_served_while_short_ones_keep_coming(order: str) -> None:
    queue, served = filled(order, [40]), []
    for number in range(2, 40):
        queue.add(sequence_of(2 * number, 4))
        queue.add(sequence_of(2 * number + 1, 4))
        picked = queue.pick(lambda sequence: True)
        assert picked is not None
        served.append(picked.number)
    assert 1 in served[:6]


def test_a_removed_sequence_is_not_offered() -> None:
    queue = WaitingQueue(FirstComeFirstServed(), 4)
    first, second = sequence_of(1, 4), sequence_of(2, 4)
    queue.add(first)
    queue.add(second)
    assert queue.remove(first)
    assert not queue.remove(first)
    offered: list[Sequence] = []
    queue.pick(lambda sequence: offered.append(sequence) is None)
    assert offered == [second]


def in_turn(pending: list[int], budget: int, *, divided: bool) -> list[tuple[int, int]]:
    waiting = [(left, sequence_of(number, 9)) for number, left in enumerate(pending, 1)]
    return [(sequence.number, most) for sequence, most in turns(waiting, budget, 0, divided=divided)]


def test_half_of_a_step_is_the_oldest_prompts_and_the_rest_for_the_shortest() -> None:
    assert in_turn([1000, 30, 3], 8, divided=True) == [(1, 4), (3, 8), (2, 8)]
    assert in_turn([1000, 2, 1], 8, divided=True) == [(1, 5), (3, 8), (2, 8)]  # what the short ones leave is the long one's
    assert in_turn([1000, 30, 3], 8, divided=False) == [(1, 8), (2, 8), (3, 8)]
    assert in_turn([1000], 8, divided=True) == [(1, 8)]


def test_a_step_of_one_position_still_takes_the_oldest_on() -> None:
    assert in_turn([1000, 30], 1, divided=True)[0] == (1, 1)
