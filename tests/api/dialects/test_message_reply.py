from __future__ import annotations

from typing import Any

import msgspec
import pytest
from anthropic.types import Message

from rackserve.api.answer import Delta, Ending
from rackserve.api.dialects.message_reply import message_error
from rackserve.api.dialects.messages import Messages
from rackserve.base.errors import RequestError
from rackserve.text.dsml_parser import ArgumentsDelta, CallStarted, ContentDelta
from tests.api.dialects.answers import END, PARTS, called, deltas, streamed, values, whole

BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


def joined(events: list[Any]) -> list[Any]:
    """The content blocks that the events of a stream build, as a client does it."""
    blocks: list[Any] = []
    arguments: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
    for index, text in arguments.items():
        blocks[index]["input"] = msgspec.json.decode(text)
    return blocks


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_builds_the_plain_answer(seed: int) -> None:
    call = called(Messages(), BODY)
    events = streamed(Messages(), call, deltas(seed=seed))
    plain = whole(Messages(), call, deltas(seed=seed + 1))
    assert joined(events) == plain["content"]
    assert events[-2]["delta"] == {"stop_reason": plain["stop_reason"], "stop_sequence": None}
    assert events[-2]["usage"] == plain["usage"] and events[-1] == {"type": "message_stop"}
    assert events[0]["message"]["id"] == plain["id"]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == starts == list(range(4))


def test_the_message_is_what_the_client_reads() -> None:
    message = Message.model_validate(whole(Messages(), called(Messages(), BODY), deltas()))
    assert message.stop_reason == "tool_use" and message.usage.cache_read_input_tokens == 4 and message.usage.input_tokens == 6
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[2].input == {"at": "é"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("ending", "reason", "sequence"),
    [
        (Ending("stop", 1, 0, 1, 1), "end_turn", None),
        (Ending("length", 1, 0, 1, 1), "max_tokens", None),
        (Ending("stop", 1, 0, 1, 1, stop="END"), "stop_sequence", "END"),
        (END, "tool_use", None),
    ],
)
def test_how_it_ended_is_told(ending: Ending, reason: str, sequence: str | None) -> None:
    plain = whole(Messages(), called(Messages(), BODY), [Delta(0, PARTS[2:3], (), ending)])
    assert (plain["stop_reason"], plain["stop_sequence"]) == (reason, sequence)


def test_a_call_that_is_cut_off_is_closed_and_has_no_made_up_arguments() -> None:
    given = [Delta(0, (CallStarted(0, "f"), ArgumentsDelta(0, '{"a":')), (), Ending("length", 1, 0, 1, 1))]
    plain = whole(Messages(), called(Messages(), BODY), given)
    assert plain["content"][0]["input"] == {} and plain["stop_reason"] == "max_tokens"
    assert [event["type"] for event in streamed(Messages(), called(Messages(), BODY), given)].count("content_block_stop") == 1


def test_a_lost_answer_ends_with_an_error_event() -> None:
    reply = Messages().reply(called(Messages(), BODY))
    reply.events(Delta(0, (ContentDelta("a"),)))
    failure = reply.failure(RequestError("rank lost", code="unavailable", status=503))
    assert [event.name for event in failure] == ["error"]
    assert values(failure)[0]["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (418, "invalid_request_error"), (500, "api_error")],
)
def test_errors_have_the_types_of_the_dialect(status: int, kind: str) -> None:
    told = message_error(RequestError("no", status=status))
    assert told["type"] == "error" and told["error"]["type"] == kind
