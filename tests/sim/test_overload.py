"""More work than a rack can do, on the virtual clock: refusals come at once, and what is accepted is served in time."""

from __future__ import annotations

from typing import Any

from rackserve.base.units import NS_PER_MS, NS_PER_S, NS_PER_US, Time
from tests.nodes.rig import VOCAB, Answer, Rig, prompt

REFUSED_WITHIN = NS_PER_MS
PROMPT = 24
OUTPUT = 2
SERVICE = 3_800 * NS_PER_US
"""A little more than what a prompt of PROMPT tokens keeps a prefill rank busy for."""

BOUNDS = {"max_queued_requests_per_rank": 8, "max_queued_tokens_per_rank": 200}


def offered(load: float, *, router: dict[str, Any], seconds: float = 1.0) -> list[Answer]:
    """Answers of requests that come evenly, `load` times as many as the rank can serve."""
    rig = Rig(router=router, topology={"prefill_blocks": 128, "decode_blocks": 256}, max_requests=10**6)
    rig.host.after_event = lambda: None
    gap = round(SERVICE / load)
    answers = [
        rig.submit(f"r{number}", [number // VOCAB, *prompt(PROMPT - 1, number)], OUTPUT, at=number * gap)
        for number in range(round(seconds * NS_PER_S / gap))
    ]
    rig.rest()
    return answers


def served(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.finish == "length"]


def waits(answers: list[Answer]) -> list[Time]:
    return sorted(answer.first - answer.sent for answer in served(answers))


def test_at_ten_times_the_load_refusals_wait_for_nothing_and_the_accepted_are_served_in_time() -> None:
    calm, flooded = offered(0.9, router=BOUNDS), offered(10, router=BOUNDS)
    refused = [answer for answer in flooded if answer.error == "overloaded"]
    assert len(served(flooded)) + len(refused) == len(flooded) and len(refused) > len(flooded) // 2
    assert max(answer.ended - answer.sent for answer in refused) < REFUSED_WITHIN
    assert len(served(flooded)) >= 0.9 * len(served(calm)), "goodput does not fall"
    bound = BOUNDS["max_queued_requests_per_rank"] * SERVICE * 2
    assert waits(flooded)[-1] <= bound
    unbounded = waits(offered(10, router={}, seconds=0.3))
    assert unbounded[-1] > 10 * bound, "without bounds the last one waits for all"


def test_choices_count_one_by_one() -> None:
    """What the frontend gets for three choices is three requests: four places hold one such call and a third of the next."""
    rig = Rig(router={"max_queued_requests_per_rank": 4})
    answers = [rig.submit(f"call{call}-{choice}", prompt(20, call), 2) for call in range(2) for choice in range(3)]
    rig.rest()
    assert [answer.error for answer in answers] == [None] * 4 + ["overloaded"] * 2


def test_small_requests_pass_a_big_one_that_does_not_fit_yet_and_it_is_served_all_the_same() -> None:
    """A rank of 50 blocks, 30 of them in use for long; a request for 40, then ten small ones; and one that can never fit."""
    rig = Rig(topology={"prefill_blocks": 50, "decode_blocks": 256}, scheduler={"max_skips": 4})
    holder = rig.submit("holder", prompt(120, 1), 2)
    big = rig.submit("big", prompt(160, 2), 2, at=NS_PER_MS)
    small = [rig.submit(f"small{number}", prompt(8, 3 + number), 2, at=2 * NS_PER_MS) for number in range(10)]
    impossible = rig.submit("impossible", prompt(201, 20), 2, at=2 * NS_PER_MS)
    rig.rest()
    assert impossible.error == "too_large" and impossible.ended - impossible.sent < REFUSED_WITHIN
    assert all(answer.finish == "length" for answer in (holder, big, *small))
    before = [answer for answer in small if answer.first < big.first]
    assert 4 <= len(before) < 10, "some pass it, and not without end"


def ttft(order: str) -> tuple[Time, list[Time], Time]:
    """Of a prompt of 3,000 tokens, of twenty small ones that come while it is computed, and of another long one after it."""
    rig = Rig(topology={"prefill_blocks": 2000, "decode_blocks": 2000}, scheduler={"order": order, "max_sequences": 64})
    rig.host.after_event = lambda: None
    first = rig.submit("first", prompt(3_000, 1), 1)
    second = rig.submit("second", prompt(3_000, 2), 1, at=NS_PER_MS)
    small = [rig.submit(f"small{n}", prompt(16, 3 + n), 1, at=(2 + n * 20) * NS_PER_MS) for n in range(20)]
    rig.rest()
    return first.first - first.sent, [answer.first - answer.sent for answer in small], second.first - second.sent


def test_short_prompts_are_not_held_up_by_a_long_one_and_it_is_not_starved() -> None:
    long_alone, behind, last_alone = ttft("fcfs")
    long_beside, beside, last_beside = ttft("shortest_first")
    assert min(behind) > 200 * NS_PER_MS and max(beside) < 20 * NS_PER_MS
    assert long_beside < 2.1 * long_alone and last_beside < 1.2 * last_alone
