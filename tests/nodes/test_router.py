"""The router's laws, and trials of placement on a small rack."""

from __future__ import annotations

import pytest

from rackserve.base.events import AttemptRetried, PrefillAdmitted, RequestPlaced, StepDone
from rackserve.base.ids import POOL_RANK, ROUTER, Rank
from rackserve.base.keys import count
from rackserve.base.messages import (
    AbortAttempt,
    BlocksStored,
    HandOver,
    Message,
    Place,
    Placed,
    Prefill,
    PrefillFinished,
    PrefillProgressed,
    PrefillStarted,
    PresenceSnapshot,
    Reserve,
    Reserved,
    SnapshotWanted,
)
from rackserve.base.units import Time
from rackserve.sim.checks import blocks_of, check_index
from tests.nodes.rig import BLOCK, MS, Rig, prompt


def computed_on(rig: Rig) -> dict[str, int]:
    """Prompt tokens computed by each prefill worker."""
    totals: dict[str, int] = {}
    for step in rig.events_of(StepDone):
        if step.rank.worker.startswith("prefill"):
            totals[step.rank.worker] = totals.get(step.rank.worker, 0) + step.new_tokens
    return totals


def test_work_is_booked_before_it_is_sent_and_released_once() -> None:
    rig = Rig()
    booked: list[int] = []
    rig.on_message(Prefill, lambda: booked.append(rig.rack.router.prefill_load.outstanding(Rank("prefill0"))))
    rig.submit("r", prompt(20), 4)
    rig.rest()
    assert booked == [20]
    assert rig.rack.router.prefill_load.is_idle()
    assert rig.rack.router.decode_load.is_idle()


def test_the_rank_chosen_is_the_rank_that_computes() -> None:
    rig = Rig(topology={"prefill_workers": 2, "prefill_ranks": 2, "decode_workers": 1, "decode_ranks": 4})
    for number in range(40):
        rig.submit(f"r{number}", prompt(9, number % 8), 2, at=number * MS)
    rig.rest()
    chosen = {(event.request, event.attempt): event.prefill for event in rig.events_of(RequestPlaced)}
    assert {(event.request, event.attempt): event.rank for event in rig.events_of(PrefillAdmitted)} == chosen
    holders = {message.holder for message in rig.messages_of(BlocksStored)}
    assert {Rank("prefill1", 1), Rank("prefill0", 0)} <= holders


def test_sixteen_subagents_share_a_prefix_that_each_worker_computes_at_most_once() -> None:
    """One parent, then sixteen children at once with a 100-block prefix and 5-block tails, on four workers."""
    rig = Rig(
        topology={"prefill_workers": 4, "pool": True, "prefill_blocks": 400, "decode_blocks": 2000, "segment_blocks": 400},
        scheduler={"max_batched_tokens": 64, "max_sequences": 20},
    )
    rig.submit("parent", prompt(100 * BLOCK), 2)
    rig.rest()
    for number in range(16):
        rig.submit(f"child{number}", prompt(100 * BLOCK) + prompt(5 * BLOCK, number + 1), 2)
    outstanding: list[list[int]] = []
    load = rig.rack.router.prefill_load
    ranks = [Rank(f"prefill{number}") for number in range(4)]
    placed = [0]

    def note() -> None:
        placed[0] += 1
        if placed[0] >= 12:  # enough work for a mean to mean something
            outstanding.append([load.outstanding(rank) for rank in ranks])

    rig.on_message(Placed, note, times=16)
    rig.rest()
    computed = computed_on(rig)
    assert sum(computed.values()) == 100 * BLOCK + 16 * 5 * BLOCK  # once in all: the others fetch it
    assert len(computed) == 4
    for loads in outstanding:
        assert max(loads) <= 2 * sum(loads) / 4


@pytest.mark.parametrize("pool", [False, True])
def test_a_worker_that_joins_under_load_gets_its_share_and_no_more(pool: bool) -> None:
    """Two workers have half again as much work as they can do when a third, empty one joins at request 40 of 120."""
    rig = Rig(topology={"prefill_workers": 3, "pool": pool, "prefill_blocks": 200}, scheduler={"max_batched_tokens": 32})
    rig.host.after_event = None  # the laws are checked by the other trials
    rig.rack.kill("prefill2", noticed_after=0)
    rig.run(MS)
    for number in range(120):
        rig.submit(f"r{number}", prompt(20, number % 10) + prompt(20, number), 1, at=MS + number * MS)
    rig.host.call(41 * MS, lambda: rig.rack.start("prefill2"))
    load, surplus = rig.rack.router.prefill_load, []

    def note() -> None:
        loads = [load.outstanding(rank) for rank in sorted(rig.rack.router._up["prefill"])]
        surplus.append(loads[-1] - sum(loads) / len(loads) if len(loads) == 3 else 0)

    rig.on_message(Placed, note, times=120)
    rig.rest()
    chosen = [event.prefill.worker for event in rig.events_of(RequestPlaced)]
    assert "prefill2" not in chosen[:40]
    assert "prefill2" in chosen[40:50]
    assert max(surplus) <= 40
    assert 12 <= chosen[60:].count("prefill2") <= 30


@pytest.mark.parametrize("pool", [False, True])
def test_a_dead_worker_is_gone_from_the_choice_at_once_and_comes_back_empty(pool: bool) -> None:
    rig = Rig(topology={"prefill_workers": 2, "pool": pool}, router={"policy": "least_uncached_work"})
    for turn in range(2):
        rig.submit(f"warm{turn}", prompt(40), 2)
        rig.rest()
    best = rig.events_of(RequestPlaced)[-1].prefill
    answers = [rig.submit(f"a{number}", prompt(40) + prompt(2, number)) for number in range(10)]
    rig.run(MS // 2)
    rig.rack.kill(best.worker, noticed_after=2 * MS)
    rig.run(3 * MS)
    answers += [rig.submit(f"b{number}", prompt(40) + prompt(2, 20 + number)) for number in range(10)]
    rig.run(1000 * MS)
    assert all(answer.finish == "length" and answer.attempts <= 2 for answer in answers)
    assert all(answer.attempts == 1 for answer in answers[10:])
    rig.rack.start(best.worker)
    rig.run(MS)
    assert rig.rack.router.index.holding(best) == []
    rig.rest()


POINTS: dict[str, type[Message]] = {
    "before anything arrives": Prefill,
    "before the reservation": Reserve,
    "before the first push": Reserved,
    "while computing": PrefillProgressed,
    "after the last computation": PrefillFinished,
    "after the last block": HandOver,
}


@pytest.mark.parametrize("point", POINTS)
def test_a_prefill_worker_may_die_at_any_point(point: str) -> None:
    """The request is served by the other worker within the time it takes to notice; requests that decode keep their pace."""
    rig = Rig(topology={"prefill_workers": 2}, scheduler={"max_batched_tokens": 8})
    running = [rig.submit(f"run{number}", prompt(8, number + 1), 40) for number in range(3)]
    rig.run(30 * MS)
    answer = rig.submit("r", prompt(24), 4)
    victims: list[str] = []

    def kill() -> None:
        victims.append(rig.events_of(RequestPlaced)[-1].prefill.worker)
        rig.rack.kill(victims[0], noticed_after=5 * MS)

    rig.on_message(POINTS[point], kill, when=lambda message: "r" in (getattr(message, "request", ""), _id(message)))
    rig.rest()
    assert len(victims) == 1
    assert answer.finish == "length"
    assert answer.ended - answer.sent < 60 * MS
    assert [other.attempts for other in running] == [1, 1, 1]
    assert max(other.ended for other in running) < 30 * MS + 40 * 3 * MS


def _id(message: Message) -> str:
    return message.request.id if isinstance(message, Prefill | Reserve) else ""


def test_a_decode_worker_that_cannot_be_reached_fails_the_other_leg_at_once() -> None:
    rig = Rig(topology={"decode_workers": 2})
    answer = rig.submit("r", prompt(24), 4)
    rig.on_message(Reserve, lambda: rig.rack.kill("decode0", noticed_after=MS))
    rig.rest()
    assert (answer.finish, answer.attempts) == ("length", 2)
    assert rig.events_of(RequestPlaced)[1].decode == Rank("decode1")
    assert answer.ended - answer.sent < 40 * MS


def test_a_prompt_too_long_for_prefill_is_refused_before_decode_hears_of_it() -> None:
    rig = Rig(topology={"prefill_blocks": 6, "decode_blocks": 64})
    edge = rig.submit("edge", prompt(24), 4)
    over = rig.submit("over", prompt(25, 1), 4)
    rig.rest()
    assert edge.finish == "length"
    assert (over.error, over.tokens) == ("too_large", [])
    assert [message.request.id for message in rig.messages_of(Reserve)] == ["edge"]


def test_full_queues_refuse_new_requests_but_never_one_that_was_accepted() -> None:
    rig = Rig(
        topology={"prefill_workers": 2},
        router={"max_queued_requests_per_rank": 4, "max_queued_tokens_per_rank": 1000},
    )
    answers = [rig.submit(f"r{number}", prompt(12, number), 4) for number in range(20)]
    rig.on_message(Reserved, lambda: rig.rack.kill("prefill0", noticed_after=MS))  # four attempts look for a new home
    rig.rest()
    refused = [answer for answer in answers if answer.error == "overloaded"]
    assert len(refused) == 12
    assert max(answer.ended - answer.sent for answer in refused) < MS
    assert [answer.finish for answer in answers].count("length") == 8
    assert max(answer.attempts for answer in answers) == 2


@pytest.mark.parametrize("lost", [1, 3, 5])
def test_a_lost_presence_event_is_noticed_and_answered_by_a_snapshot(lost: int) -> None:
    rig = Rig()
    rig.lose(BlocksStored, 1, lambda message: message.holder == Rank("prefill0") and message.number == lost)
    for number in range(8):
        rig.submit(f"r{number}", prompt(8, number), 1)
        rig.rest()
    assert [message.holder for message in rig.messages_of(SnapshotWanted)] == [Rank("prefill0")]
    assert len(rig.messages_of(PresenceSnapshot)) == 1
    cache = rig.prefill().worker.caches[0]
    claimed = blocks_of(rig.rack.router.index.holding(Rank("prefill0")))
    assert claimed == blocks_of(cache.chains())
    check_index(rig.rack)


def test_a_lost_snapshot_is_asked_for_again() -> None:
    rig = Rig()
    rig.lose(BlocksStored, 1, lambda message: message.holder == Rank("prefill0"))
    rig.lose(PresenceSnapshot, 2)
    for number in range(6):
        rig.submit(f"r{number}", prompt(8, number), 1)
        rig.rest()
    assert len(rig.messages_of(SnapshotWanted)) == 3
    assert blocks_of(rig.rack.router.index.holding(Rank("prefill0"))) == blocks_of(rig.prefill().worker.caches[0].chains())


def test_the_pool_counts_when_a_rank_is_weighed() -> None:
    rig = Rig(topology={"pool": True, "prefill_workers": 2}, router={"policy": "round_robin"})
    rig.submit("warm", prompt(41), 1)
    rig.rest()
    assert sum(map(count, rig.rack.router.index.holding(POOL_RANK))) == 10
    rig.submit("again", prompt(41), 1)
    rig.rest()
    placed = rig.events_of(RequestPlaced)[1]
    assert (placed.prefill.worker, placed.pool_tokens, placed.predicted_cached_tokens) == ("prefill1", 40, 40)


def test_a_booking_is_put_right_by_what_prefill_really_found() -> None:
    rig = Rig()
    rig.submit("r", prompt(40), 2)
    rig.host.run(until=rig.host.now + MS // 2)
    load, rank = rig.rack.router.prefill_load, Rank("prefill0")
    assert load.outstanding(rank) == 40
    rig.rack.router.handle(PrefillStarted("r", 1, rank, 16))
    assert load.outstanding(rank) == 24


def test_a_booking_shrinks_as_the_prompt_is_computed() -> None:
    rig = Rig()
    seen: list[int] = []
    load = rig.rack.router.prefill_load

    def rule(source: str, target: str, message: Message) -> list[Time] | None:
        if isinstance(message, PrefillProgressed | PrefillStarted | PrefillFinished):
            rig.host.call(rig.host.now + MS // 10, lambda: seen.append(load.outstanding(Rank("prefill0"))))
        return None

    rig.rules.append(rule)
    rig.submit("r", prompt(40), 2)
    rig.rest()
    assert seen == [24, 8, 0]  # it began as it was expected, so nothing was to be put right


def test_a_booking_that_outlives_its_deadline_is_released_and_the_attempt_placed_again() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 4)
    rig.lose(Prefill)
    rig.rest()
    assert (answer.finish, answer.attempts) == ("length", 2)
    assert [event.reason for event in rig.events_of(AttemptRetried)] == ["booking deadline"]
    assert len(rig.messages_of(AbortAttempt)) == 2


def test_a_doubled_place_starts_one_attempt() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 4)
    rig.on_message(Place, lambda: rig.host.post(ROUTER, rig.host.now, Place(answer.request)))
    rig.rest()
    assert len(rig.messages_of(Prefill)) == 1


def test_late_messages_about_a_closed_attempt_leave_the_books_alone() -> None:
    rig = Rig()
    rig.submit("r", prompt(12), 4)
    rig.rest()
    rank = Rank("prefill0")
    for message in (PrefillStarted("r", 1, rank, 0), PrefillProgressed("r", 1, rank, 5), PrefillFinished("r", 1, rank)):
        rig.host.post(ROUTER, rig.host.now, message)
    rig.rest()
    assert rig.rack.router.prefill_load.is_idle()
