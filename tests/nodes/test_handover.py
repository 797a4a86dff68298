"""Pushes and the hand-over: what the decode rank is told is true when it is told."""

from __future__ import annotations

from rackserve.base.events import TransferDone
from rackserve.base.messages import HandOver, PushesEnded, Reserve, Reserved, TransferFinished
from tests.nodes.rig import BLOCK, MS, Rig, prompt


def test_kv_is_pushed_while_the_rest_is_still_computed() -> None:
    rig = Rig(scheduler={"max_batched_tokens": 8})
    rig.submit("r", prompt(32), 2)
    rig.rest()
    pushes = [(now, event.num_slots) for now, _, event in rig.events if isinstance(event, TransferDone)]
    computed = next(now for now, _, _, message in rig.sent if isinstance(message, HandOver))
    assert len(pushes) > 1
    assert pushes[0][0] < computed - 2 * MS
    assert sum(slots for _, slots in pushes) == 8


def test_the_hand_over_comes_after_the_last_push_ended() -> None:
    rig = Rig()
    rig.submit("r", prompt(30), 2)
    rig.rest()
    hand_over = next(now for now, _, _, message in rig.sent if isinstance(message, HandOver))
    assert hand_over == max(now for now, _, event in rig.events if isinstance(event, TransferDone))


def test_a_doubled_reservation_is_used_once() -> None:
    rig = Rig()
    rig.submit("r", prompt(30), 4)
    rig.rules.append(lambda source, target, message: [0, MS] if isinstance(message, Reserved) else None)
    rig.rest()
    assert sum(event.num_slots for event in rig.events_of(TransferDone)) == 8


def test_a_reservation_for_an_attempt_that_is_over_is_given_back_at_once() -> None:
    rig = Rig()
    rig.submit("r", prompt(30), 4)
    rig.run(500 * MS)
    assert rig.decode().is_quiet
    rig.host.post("decode0", rig.host.now, *rig.messages_of(Reserve))
    rig.run(MS)
    assert len(rig.messages_of(Reserved)) == 2
    assert rig.decode().is_quiet
    rig.rest()


def test_an_answer_about_pushes_comes_only_when_none_is_under_way() -> None:
    rig = Rig()
    store = rig.rack.sites["prefill0"].store
    assert store is not None
    store.slowdown = 40.0
    rig.submit("r", prompt(40), 4)
    rig.run(8 * MS)
    assert rig.prefill().worker.moves.under_way()
    rig.cancel("r")
    rig.rest()
    told = next(now for now, _, _, message in rig.sent if isinstance(message, PushesEnded))
    assert told == max(now for now, _, event in rig.events if isinstance(event, TransferDone))


def test_the_partly_filled_last_block_is_pushed_with_the_others() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(2 * BLOCK + 1), 6)
    rig.rest()
    assert sum(event.num_slots for event in rig.events_of(TransferDone)) == 3
    assert answer.tokens == rig.cold(answer)


def test_a_doubled_end_of_a_push_hands_over_nothing() -> None:
    """A late doubled end of a transfer finds nobody to hand over."""
    rig = Rig()
    rig.submit("r", prompt(30), 4)
    rig.run(20 * MS)
    rig.host.post("prefill0", rig.host.now, TransferFinished(1))
    rig.rest()
    assert len(rig.messages_of(HandOver)) == 1
