"""What a choice depends on reaches the rank that chooses, wherever a request is computed; failures stay with their request."""

from __future__ import annotations

import pytest

from rackserve.base.events import AttemptRetried, RequestEnded
from rackserve.base.messages import HandOver, Output, Prefill, Reserve, TokensEmitted
from rackserve.base.request import MAX_PROMPT_SCORES, Constraint, SamplingParams
from rackserve.base.step import UNSUPPORTED
from tests.nodes.rig import BLOCK, MS, Rig, prompt

READS = [SamplingParams(frequency_penalty=0.5), SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.5)]


@pytest.mark.parametrize("sampling", READS)
@pytest.mark.parametrize(
    "scheduler",
    [{"max_batched_tokens": 8, "max_steps_in_flight": 2}, {"max_steps_in_flight": 1, "num_draft": 3, "max_batched_tokens": 16}],
)
def test_choices_that_depend_on_the_output_are_a_cold_servers(sampling: SamplingParams, scheduler: dict[str, int]) -> None:
    rig = Rig(topology={"pool": True, "prefill_workers": 2, "decode_workers": 2}, scheduler=scheduler)
    answers = [
        rig.submit(
            f"r{number}", prompt(20) + prompt(3 + number, number), 9, at=number * MS, sampling=[*READS, None][number % 3]
        )
        for number in range(9)
    ]
    rig.submit("mine", prompt(30), 9, sampling=sampling)
    rig.rest()  # compares with a cold server
    assert {answer.finish for answer in answers} == {"length"}


@pytest.mark.parametrize("sampling", READS)
def test_an_attempt_goes_on_from_what_was_delivered(sampling: SamplingParams) -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(12), 9, sampling=sampling)
    rig.lose(TokensEmitted, 1, lambda message: message.index == 4)
    rig.lose(HandOver, 1)
    rig.rest()
    assert answer.attempts > 1
    assert (answer.finish, len(answer.tokens)) == ("length", 9)


@pytest.mark.parametrize("sampling", READS)
def test_a_preempted_sequence_goes_on_by_the_same_choices(sampling: SamplingParams) -> None:
    rig = Rig(topology={"decode_blocks": 16}, scheduler={"max_sequences": 4})
    for number in range(4):
        rig.submit(f"r{number}", prompt(8, number), 24, sampling=sampling)
    rig.rest()
    assert "preempted" in {event.reason for event in rig.events_of(AttemptRetried)}


def test_a_request_that_cannot_be_done_fails_alone_and_at_once() -> None:
    rig = Rig()
    good = rig.submit("good", prompt(9), 6)
    bad = rig.submit("bad", prompt(9, 1), 6, sampling=SamplingParams(constraint=Constraint("json_object")))
    scored = rig.submit("scored", prompt(40, 2), 6, prompt_logprobs=0)
    rig.rest()
    assert (good.finish, bad.error, scored.error) == ("length", UNSUPPORTED, UNSUPPORTED)
    assert (bad.finish, bad.attempts, bad.tokens) == (None, 1, [])
    ended = {event.request: (event.outcome, event.reason) for event in rig.events_of(RequestEnded)}
    assert ended["bad"] == ("aborted", UNSUPPORTED)
    details = {message.request: message.detail for message in rig.messages_of(Output) if message.error}
    assert "this model cannot" in details["bad"]


def test_a_prompt_that_is_scored_is_computed_whole_and_leaves_its_blocks_to_others() -> None:
    rig = Rig(topology={"pool": True})
    tokens = prompt(3 * BLOCK + 1)
    rig.submit("warm", tokens, 1)
    rig.rest()
    scored = rig.submit("scored", tokens, 1, prompt_logprobs=1)
    rig.rest()
    assert scored.usage is not None
    assert scored.usage.cached_tokens == 0
    again = rig.submit("again", tokens, 1)
    rig.rest()
    assert again.usage is not None
    assert again.usage.cached_tokens == 3 * BLOCK
    assert [message.request.prompt_logprobs for message in rig.messages_of(Prefill)] == [-1, 1, -1]
    assert not rig.messages_of(Reserve)


def test_more_scores_than_fit_a_message_are_refused_at_once() -> None:
    rig = Rig()
    answer = rig.submit("r", prompt(10), 1, prompt_logprobs=MAX_PROMPT_SCORES // 10)
    rig.rest()
    assert (answer.error, answer.attempts) == ("too_large", 1)
