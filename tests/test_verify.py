from __future__ import annotations

import math
import re
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError
from rackserve.base.ids import FRONTEND, NodeId
from rackserve.base.messages import Cancel, Message, Output, Submit
from rackserve.base.request import Request
from rackserve.base.step import ItemResult, Step, StepResult, TokenLogprobs
from rackserve.config import load_settings
from rackserve.demo import GOLDEN_SETTINGS
from rackserve.digest_model import DigestRunner, cold_output, digest_layout
from rackserve.live.runner import RunnerSpec
from rackserve.verify import Answer, Difference, Transcript, check_verifiable, compare_with_cold, open_cold

BLOCK_TOKENS = 4


def request(name: str, ids: list[int], max_tokens: int = 8) -> Request:
    return Request(name, "", array("i", ids).tobytes(), b"", len(ids), max_tokens)


def digest_runner() -> DigestRunner:
    layout = digest_layout(BLOCK_TOKENS)
    return DigestRunner(memoryview(bytearray(64 * layout.block_bytes)), 64, layout)


def served(name: str, ids: list[int], count: int = 8) -> Answer:
    return Answer(request(name, ids), cold_output(array("i", ids).tobytes(), count), complete=True)


# ---------------------------------------------------------------- transcript


class Kept:
    """A node and a transport that keep what they get."""

    def __init__(self) -> None:
        self.handled: list[Message] = []
        self.sent: list[tuple[NodeId, Message]] = []

    def handle(self, message: Message) -> None:
        self.handled.append(message)

    def send(self, to: NodeId, message: Message) -> None:
        self.sent.append((to, message))


def test_a_transcript_holds_each_request_with_the_tokens_its_client_was_sent() -> None:
    kept, transcript = Kept(), Transcript()
    node, transport = transcript.around_node(kept), transcript.around_transport(kept)
    sent = [Submit(request("r", [1, 2]), "api"), Submit(request("s", [3]), "api"), Cancel("s")]
    for message in sent:
        transport.send(FRONTEND, message)
    outputs = [Output("r", 0, (5,)), Output("s", 0, (9,)), Output("r", 1, (6, 7), finish="length")]
    outputs.append(Output("s", 1, (), finish="cancelled"))
    for output in outputs:
        node.handle(output)
    assert kept.sent == [(FRONTEND, message) for message in sent] and kept.handled == outputs
    assert {name: (a.tokens, a.complete) for name, a in transcript.answers.items()} == {
        "r": ([5, 6, 7], True),
        "s": ([9], False),
    }


@pytest.mark.parametrize(("finish", "complete"), [("stop", True), ("length", True), ("cancelled", False), (None, False)])
def test_an_answer_is_complete_only_if_it_ended_by_itself(finish: str | None, complete: bool) -> None:
    transcript = Transcript()
    transcript.around_transport(Kept()).send(FRONTEND, Submit(request("r", [1]), "api"))
    transcript.around_node(Kept()).handle(Output("r", 0, (1,), finish=finish, error=None if finish else "unavailable"))
    assert transcript.answers["r"].complete is complete


# ---------------------------------------------------------------- what can be compared


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("runner.resume=bounded_replay", "runner.resume bounded_replay is approximate"),
        ("runner.synthetic_acceptance=2", "runner.synthetic_acceptance the output is not the model's"),
        ("topology.decode_tp=2", "set topology.prefill_tp and topology.decode_tp to the same"),
    ],
)
def test_a_rack_that_a_cold_rank_cannot_stand_for_is_refused_before_it_runs(change: str, says: str) -> None:
    check_verifiable(GOLDEN_SETTINGS)
    with pytest.raises(ConfigError, match=f"--verify: .*{re.escape(says)}"):
        check_verifiable(load_settings(None, [change], GOLDEN_SETTINGS))


def test_a_cold_rank_has_room_for_the_longest_answer() -> None:
    spec = RunnerSpec(block_tokens=BLOCK_TOKENS)
    answers = [served("a", list(range(BLOCK_TOKENS)), 1), served("b", [1, 2], 3)]
    with open_cold(spec, digest_layout(BLOCK_TOKENS), BLOCK_TOKENS + 1) as runner:
        assert compare_with_cold(answers, runner, BLOCK_TOKENS) == []


# ---------------------------------------------------------------- comparison


def test_what_a_cold_rank_would_say_has_no_difference() -> None:
    answers = [served("a", [1, 2, 3]), served("b", list(range(30))), served("c", [1, 2, 3, 4], 1), Answer(request("d", [5]))]
    seen: list[int] = []
    assert compare_with_cold(answers, digest_runner(), BLOCK_TOKENS, seen.append) == []
    assert seen == [1, 2, 3, 4]


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 63), min_size=1, max_size=12), st.integers(0, 7), st.integers(1, 63))
def test_a_wrong_token_is_found_where_it_stands_and_what_follows_from_it_is_not_blamed(
    ids: list[int], place: int, shift: int
) -> None:
    good, bad = served("good", ids), served("bad", ids)
    right = bad.tokens[place]
    bad.tokens[place] = (right + shift) % 64
    prefix = array("i", [*ids, *bad.tokens[: place + 1]]).tobytes()
    bad.tokens[place + 1 :] = cold_output(prefix, 7 - place) if place < 7 else []
    found = compare_with_cold([good, bad, good], digest_runner(), BLOCK_TOKENS)
    assert found == [Difference("bad", place, bad.tokens[place], right, math.inf)]


class Scripted:
    """A runner that samples the same token with the same log-probabilities at each position."""

    layout = digest_layout(BLOCK_TOKENS)

    def __init__(self, top: tuple[tuple[int, float], ...]) -> None:
        self._top = top

    def run(self, step: Step) -> StepResult:
        token, best = self._top[0]
        logprobs = (TokenLogprobs(best, self._top),)
        return StepResult(step.dp_rank, tuple(ItemResult(item.sequence, (token,), logprobs) for item in step.items))


def test_the_gap_is_how_far_the_served_token_lies_below_the_best() -> None:
    answer = Answer(request("r", [1, 2]), [7, 8, 9])
    found = compare_with_cold([answer], Scripted(((7, -0.5), (8, -0.51))), BLOCK_TOKENS)
    assert [(d.index, d.served, d.cold) for d in found] == [(1, 8, 7), (2, 9, 7)]
    assert found[0].gap == pytest.approx(0.01)
    assert found[1].gap == math.inf  # two other tokens tie; that excuses nothing
    assert str(found[0]) == "r: output 1 is 8, cold 7; its logit lies 0.0100 below the best"
