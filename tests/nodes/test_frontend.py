"""The frontend's laws: every request ends once, whatever happens to its attempts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rackserve.base.errors import ConfigError
from rackserve.base.events import AttemptRetried, FirstTokenSent, MessageDropped, RequestEnded
from rackserve.base.ids import FRONTEND, ROUTER, NodeId, Rank
from rackserve.base.messages import (
    AbortAttempt,
    AttemptLost,
    Drain,
    Drained,
    HandOver,
    Message,
    Output,
    Place,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    Submit,
    TokensEmitted,
)
from rackserve.base.units import Time
from rackserve.nodes.frontend import FrontendConfig
from tests.nodes.rig import CLIENT, MS, SHORT, Rig, prompt


def busy(rig: Rig) -> bool:
    """Whether any worker holds something for an attempt."""
    return not all(node.is_quiet for node in rig.rack.workers().values())


@pytest.mark.parametrize("where", ["queued", "prefill", "decode"])
def test_a_cancelled_request_is_gone_from_every_rank_within_two_steps(where: str) -> None:
    rig = Rig(topology={"prefill_blocks": 16}, scheduler={"max_steps_in_flight": 2})
    if where == "queued":
        rig.submit("other", prompt(60, 1), 2)
    answer = rig.submit("r", prompt(40), 50, at=MS)
    rig.run({"queued": 3, "prefill": 3, "decode": 20}[where] * MS)
    state = {
        name: sequence.state
        for name in ("prefill0", "decode0")
        for sequence in rig.rack.workers()[name].worker.sequences.values()
        if sequence.request.id == "r"
    }
    assert state[{"queued": "prefill0", "prefill": "prefill0", "decode": "decode0"}[where]] in {
        "queued": ("queued",), "prefill": ("ready", "running"), "decode": ("ready", "running"),
    }[where]  # fmt: skip
    rig.cancel("r")
    rig.run(2 * 3 * MS)  # two steps of 16 tokens take 5.2 ms
    for node in rig.rack.workers().values():
        assert not any(sequence.request.id == "r" for sequence in node.worker.sequences.values())
    got = len(answer.tokens)
    rig.rest()
    assert (answer.finish, len(answer.tokens)) == ("cancelled", got)
    assert [event.reason for event in rig.events_of(RequestEnded)].count("cancelled") == 1
    for node in rig.rack.workers().values():
        assert node.worker.caches[0].num_in_use == 0


DROPS: dict[str, tuple[type[Message], str]] = {
    "placed": (Prefill, "prefill0"),
    "reserving": (Reserve, "decode0"),
    "moving": (Reserved, "prefill0"),
    "between": (HandOver, "decode0"),
    "running": (TokensEmitted, FRONTEND),
}


@pytest.mark.parametrize("point", DROPS)
def test_fifty_requests_dropped_in_a_row_leave_nothing_behind(point: str) -> None:
    """On ranks with room for ten; a request after them starts at once: nothing waits for a timer."""
    kind, _ = DROPS[point]
    rig = Rig(topology={"prefill_blocks": 50, "decode_blocks": 50})
    for number in range(50):
        name = f"r{number}"
        rig.submit(name, prompt(16, number), 4, at=number * MS)
        rig.on_message(kind, lambda name=name: rig.cancel(name), when=lambda message, name=name: _names(message) == name)  # type: ignore[misc]
    rig.run(400 * MS)
    assert not busy(rig)
    after = rig.submit("after", prompt(16, 60), 4)
    rig.run(20 * MS)
    assert after.finish == "length"
    rig.rest()
    ended = [answer.finish for name, answer in rig.client.answers.items() if name != "after"]
    assert ended.count("cancelled") == 50


def _names(message: Message) -> str:
    return message.request.id if isinstance(message, Prefill | Reserve) else str(getattr(message, "request", ""))


def test_a_seeded_request_draws_the_same_tokens_whatever_runs_beside_it() -> None:
    def tokens(neighbours: int, seed: int, turns: int = 1) -> list[int]:
        rig = Rig(topology={"decode_blocks": 26})
        for turn in range(turns):
            answer = rig.submit(f"r{turn}", prompt(14), 12, seed=seed)
            for number in range(neighbours):
                rig.submit(f"n{turn}.{number}", prompt(10, number + 1), 12, seed=number if number % 2 else None)
            rig.rest()
        return answer.tokens

    alone = tokens(0, seed=5)
    assert tokens(1, seed=5) == tokens(7, seed=5) == tokens(7, seed=5, turns=2) == alone
    assert tokens(0, seed=6) != alone


def test_output_lost_on_the_way_is_made_again_by_another_attempt() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 8)
    rig.lose(TokensEmitted, 1, lambda message: message.index == 3)
    rig.rest()
    assert (answer.finish, answer.attempts) == ("length", 2)
    assert [event.reason for event in rig.events_of(AttemptRetried)] == ["output lost"]


def test_a_silent_attempt_is_given_up_and_placed_again() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 8)
    rig.lose(TokensEmitted, 1, lambda message: message.finish is not None)
    rig.rest()
    assert (answer.finish, answer.attempts) == ("length", 2)
    assert [event.reason for event in rig.events_of(AttemptRetried)] == ["silent"]


def test_messages_of_an_attempt_that_is_over_touch_nothing() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 30)
    rig.lose(TokensEmitted, 1, lambda message: message.index == 3)
    rig.run(15 * MS)
    while answer.attempts < 2:
        rig.run(MS)
    got = len(answer.tokens)
    dropped = len(rig.events_of(MessageDropped))
    for message in (
        TokensEmitted("r", 1, Rank("decode0"), got, (63,), 0),
        AttemptLost("r", 1, "late"),
        Refused("r", 1, "x", "late", False),
    ):
        rig.host.post(FRONTEND, rig.host.now, message)
    rig.run(0)
    assert len(answer.tokens) == got
    assert len(rig.events_of(MessageDropped)) == dropped + 3
    rig.rest()
    assert answer.attempts == 2


def test_failures_beyond_the_limit_end_the_request_with_an_error() -> None:
    rig = Rig(max_attempts=3)
    answer = rig.submit("r", prompt(12), 8)
    rig.lose(HandOver, 100)
    rig.rest()
    assert (answer.error, answer.attempts) == ("unavailable", 3)
    assert len(answer.tokens) == 3  # each attempt's first token was delivered


def test_a_request_waits_for_a_rank_to_come_back_but_not_for_ever() -> None:
    rig = Rig()
    rig.rack.kill("decode0", noticed_after=0)
    rig.run(MS)
    served = rig.submit("served", prompt(12))
    rig.run(1000 * MS)
    rig.rack.start("decode0")
    rig.run(1000 * MS)
    assert served.finish == "length"
    rig.rack.kill("prefill0", noticed_after=0)
    rig.run(MS)
    failed = rig.submit("failed", prompt(12))
    rig.rest()
    assert failed.error == "unavailable"
    assert SHORT.ns("unavailable") <= failed.ended - failed.sent < SHORT.ns("unavailable") + 1000 * MS


def test_a_waiting_request_whose_placement_is_lost_is_placed_again() -> None:
    rig = Rig()
    rig.rack.kill("decode0", noticed_after=0)
    rig.run(MS)
    answer = rig.submit("r", prompt(12))
    rig.run(120 * MS)
    rig.lose(Place)
    rig.rack.start("decode0")
    rig.rest()
    assert answer.finish == "length"
    assert answer.ended - answer.sent < SHORT.ns("silence") + 1000 * MS


def test_the_deadline_of_a_request_ends_it() -> None:
    rig = Rig(deadlines=replace(SHORT, request=0.02))
    answer = rig.submit("r", prompt(12), 100)
    rig.rest()
    assert answer.error == "timeout"
    assert answer.ended - answer.sent < 21 * MS
    assert answer.tokens


def test_an_id_may_be_used_again_after_its_request_has_ended() -> None:
    rig = Rig(deadlines=replace(SHORT, request=0.1))
    rig.submit("r", prompt(12), 4)
    rig.run(90 * MS)
    again = rig.submit("r", prompt(12), 30)
    rig.run(20 * MS)  # the first one's deadline passes
    assert again.error is None
    rig.rest()
    assert again.finish == "length"


def test_a_running_id_is_refused_and_the_running_request_goes_on() -> None:
    rig = Rig()
    first = rig.submit("r", prompt(12), 12)
    rig.run(10 * MS)
    got: list[Message] = []

    class Other:
        def handle(self, message: Message) -> None:
            got.append(message)

    rig.rack.add_node("other", lambda ports: Other())
    rig.host.send("other", FRONTEND, Submit(first.request, "other"))
    rig.rest()
    assert [message.error for message in got if isinstance(message, Output)] == ["duplicate"]
    assert (first.finish, first.attempts) == ("length", 1)


def test_more_than_the_limit_is_refused_at_once_and_the_rest_is_served() -> None:
    rig = Rig(max_requests=4)
    answers = [rig.submit(f"r{number}", prompt(12, number)) for number in range(20)]
    rig.rest()
    refused = [answer for answer in answers if answer.error == "overloaded"]
    assert len(refused) == 16
    assert max(answer.ended - answer.sent for answer in refused) < MS
    assert sum(answer.finish == "length" for answer in answers) == 4


def test_draining_refuses_new_requests_and_reports_when_the_old_ones_have_ended() -> None:
    rig = Rig(topology={"prefill_blocks": 16})
    running = [rig.submit(f"r{number}", prompt(30, number), 12) for number in range(5)]
    rig.run(10 * MS)
    rig.host.send(CLIENT, FRONTEND, Drain(CLIENT))
    late = rig.submit("late", prompt(4))
    rig.run(MS)
    assert late.error == "draining"
    assert not rig.client.other
    rig.rest()
    assert [answer.finish for answer in running] == ["length"] * 5
    assert rig.client.other == [Drained()]


def test_first_token_time_and_usage_are_those_of_the_whole_request() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 8)
    rig.lose(HandOver)
    rig.rest()
    (first,) = rig.events_of(FirstTokenSent)
    (ended,) = rig.events_of(RequestEnded)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.output_tokens) == (12, 8)
    assert (ended.ttft_ns, ended.attempts, ended.output_tokens) == (first.ttft_ns, 2, 8)
    assert first.ttft_ns < 10 * MS < ended.total_ns


def test_a_cancel_after_the_end_sends_nothing() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 4)
    rig.rest()
    rig.cancel("r")
    rig.rest()
    assert answer.ends == 1
    assert not rig.messages_of(AbortAttempt)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"frontend\.max_attempts"):
        FrontendConfig(max_attempts=0)
    with pytest.raises(ConfigError, match=r"frontend\.max_requests"):
        FrontendConfig(max_requests=0)


def test_a_rank_whose_abort_was_lost_is_told_again_when_it_emits() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 200)
    while len(answer.tokens) < 3:
        rig.run(MS)
    rig.rules.append(lambda source, target, message: [] if isinstance(message, AbortAttempt) and source == ROUTER else None)
    rig.cancel("r")
    rig.run(20 * MS)
    assert answer.finish == "cancelled"
    assert rig.decode().is_quiet, "the rank would otherwise go on to token 200"
    rig.rest()


def test_tokens_that_overtake_the_first_one_wait_for_it() -> None:
    rig = Rig()

    def late(source: NodeId, target: NodeId, message: Message) -> list[Time] | None:
        return [20 * MS] if isinstance(message, TokensEmitted) and source == "prefill0" else None

    rig.rules.append(late)
    answer = rig.submit("r", prompt(12), 8)
    rig.rest()
    assert (answer.finish, answer.attempts) == ("length", 1)
    assert not rig.events_of(AttemptRetried)
