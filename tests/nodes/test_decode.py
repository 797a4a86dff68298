"""The decode worker's laws, on a small rack."""

from __future__ import annotations

import pytest

from rackserve.base.events import AttemptRetried, Preempted, StepDone, TransferDone
from rackserve.base.messages import (
    AttemptFailed,
    HandOver,
    PushesEnded,
    Refused,
    Reserve,
    Reserved,
    TokensEmitted,
    TransferFinished,
)
from tests.nodes.rig import BLOCK, MS, SHORT, Rig, prompt


@pytest.mark.parametrize("warm", [0, 1, 3, 7])
@pytest.mark.parametrize("warm_prefill", [0, 5])
def test_only_blocks_the_decode_rank_lacks_are_pushed(warm: int, warm_prefill: int) -> None:
    rig = Rig(topology={"prefill_workers": 2}, router={"policy": "round_robin"})
    if warm:  # decode0 and prefill0 get the first `warm` blocks
        rig.submit("warm", prompt(warm * BLOCK), 2)
    else:
        rig.submit("warm", prompt(4, 9), 2)
    rig.rest()
    if warm_prefill:  # a one-token answer never reaches the decode rank
        rig.submit("prefill", prompt(warm_prefill * BLOCK), 1)
        rig.rest()
        rig.submit("turn", prompt(4, 9), 1)
        rig.rest()
    before = len(rig.events_of(TransferDone))
    answer = rig.submit("r", prompt(7 * BLOCK), 4)
    rig.rest()
    pushed = sum(event.num_slots for event in rig.events_of(TransferDone)[before:] if event.kind == "push")
    assert pushed == 7 - warm
    assert answer.tokens == rig.cold(answer)


def test_tokens_arrive_in_order_and_one_step_at_a_time() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(10), 8)
    rig.rest()
    emitted = rig.messages_of(TokensEmitted)
    assert [message.index for message in emitted] == list(range(8))
    assert [message.finish for message in emitted] == [None] * 7 + ["length"]
    assert answer.usage is not None
    assert answer.usage.output_tokens == 8


def test_drafts_are_accepted_several_at_a_time_and_change_nothing() -> None:
    rig = Rig(scheduler={"num_draft": 3, "max_steps_in_flight": 1})
    rig.submit("r", prompt(10), 30)
    rig.rest()
    steps = [event for event in rig.events_of(StepDone) if event.rank.worker == "decode0"]
    assert max(len(message.tokens) for message in rig.messages_of(TokensEmitted)) > 1
    assert len(steps) < 29


@pytest.mark.parametrize(("in_flight", "num_draft"), [(1, 0), (2, 0), (1, 3)])
def test_turns_resume_from_stored_states_of_window_layers(in_flight: int, num_draft: int) -> None:
    rig = Rig(
        window=True,
        topology={"pool": True, "prefill_workers": 2},
        router={"policy": "round_robin"},
        scheduler={"max_steps_in_flight": in_flight, "num_draft": num_draft},
    )
    history = prompt(9)
    for turn in range(5):
        answer = rig.submit(f"t{turn}", history, 5 + turn)
        rig.rest()
        assert answer.usage is not None
        assert turn == 0 or answer.usage.cached_tokens >= BLOCK
        history = history + answer.tokens + prompt(3, turn)


def test_the_youngest_gives_way_and_is_placed_again() -> None:
    rig = Rig(topology={"decode_blocks": 12})
    old = rig.submit("old", prompt(12), 24)
    young = rig.submit("young", prompt(12, 1), 24, at=5 * MS)
    rig.rest()
    assert {event.request for event in rig.events_of(Preempted)} == {"young"}
    assert (old.attempts, old.finish) == (1, "length")
    assert (young.attempts > 1, young.finish) == (True, "length")


def test_room_for_one_and_a_half_requests_serves_ten() -> None:
    """More preemptions than `max_attempts` allows failures: a preempted request has not failed."""
    rig = Rig(topology={"decode_blocks": 33}, scheduler={"max_sequences": 16}, max_attempts=2)
    answers = [rig.submit(f"r{number}", prompt(8, number), 80) for number in range(10)]
    rig.rest()
    assert all(answer.finish == "length" for answer in answers)
    assert max(answer.attempts for answer in answers) > 3
    assert {event.reason for event in rig.events_of(AttemptRetried)} == {"preempted"}


def test_a_request_that_can_never_fit_is_refused_at_entry() -> None:
    rig = Rig(topology={"decode_blocks": 10})
    edge = rig.submit("edge", prompt(20), 20)
    over = rig.submit("over", prompt(20, 1), 21)
    rig.rest()
    assert edge.finish == "length"
    assert over.error == "too_large"
    assert not over.tokens


def test_a_decode_rank_that_finds_a_request_too_large_ends_it_for_good() -> None:
    """The router's picture may be wrong: then the worker's word goes to the client, and prefill stops."""
    rig = Rig(topology={"decode_blocks": 10})
    rig.rack.router._capacity = type(rig.rack.router._capacity)(1000, 1000, BLOCK, 0.02)
    answer = rig.submit("over", prompt(30), 30)
    rig.rest()
    assert answer.error == "too_large"
    assert len(rig.messages_of(Refused)) == 1


def test_an_aborted_reservation_stays_held_until_pushes_have_ended() -> None:
    """The abort reaches decode while a slow push is under way: its blocks may be reused only after the prefill rank's word."""
    rig = Rig(topology={"decode_blocks": 8}, scheduler={"max_batched_tokens": 8})
    store = rig.rack.sites["prefill0"].store
    assert store is not None
    store.slowdown = 100.0
    rig.submit("r", prompt(24), 4)
    rig.lose(PushesEnded, 3)
    rig.run(5 * MS)
    rig.cancel("r")
    rig.run(1 * MS)
    held = rig.decode().worker.caches[0]
    assert held.num_in_use == 7
    assert rig.submit("next", prompt(24, 1), 4).ends == 0
    rig.rest()
    assert held.num_in_use == 0
    assert len([m for m in rig.messages_of(AttemptFailed) if m.reason == "decode gave up"]) >= 3


def test_a_dead_prefill_rank_ends_the_wait_for_its_pushes() -> None:
    rig = Rig(topology={"prefill_workers": 2})
    answer = rig.submit("r", prompt(24), 4)
    rig.on_message(Reserved, lambda: rig.rack.kill("prefill0", noticed_after=5 * MS))
    rig.rest()
    assert (answer.finish, answer.attempts) == ("length", 2)
    assert answer.ended < 100 * MS


def test_hand_over_of_an_attempt_that_is_over_starts_nothing() -> None:
    rig = Rig()
    rig.submit("r", prompt(12), 4)
    rig.rest()
    steps = len(rig.events_of(StepDone))
    rig.host.send("prefill0", "decode0", HandOver("r", 1, (5,), 0))
    rig.host.send("prefill0", "decode0", HandOver("unknown", 1, (5,), 0))
    rig.host.post("decode0", rig.host.now, TransferFinished(77))
    rig.rest()
    assert len(rig.events_of(StepDone)) == steps


def test_a_lost_hand_over_costs_a_deadline_and_another_attempt() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 4)
    rig.lose(HandOver)
    rig.rest()
    assert (answer.finish, answer.attempts) == ("length", 2)
    assert answer.ended < SHORT.ns("receive") + 100 * MS


def test_a_lost_reserve_is_noticed_by_the_prefill_rank() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 4)
    rig.lose(Reserve)
    rig.rest()
    assert (answer.finish, answer.attempts) == ("length", 2)
    assert answer.ended < SHORT.ns("handover") + 100 * MS


def test_an_engine_failure_loses_the_step_and_nothing_else() -> None:
    rig = Rig()
    rig.submit("a", prompt(12), 8)
    rig.submit("b", prompt(9, 1), 8)
    rig.run(12 * MS)
    engine = rig.rack.sites["decode0"].engine
    assert engine is not None
    engine.fail_next = "out of memory"
    rig.rest()
    assert "engine: out of memory" in {event.reason for event in rig.events_of(AttemptRetried)}
