from __future__ import annotations

from typing import Any

import msgspec
import openresponses_types.types as spec
import pytest
from openai.types.responses import Response

from rackserve.api.answer import Delta, Ending, TokenEntry
from rackserve.api.dialects.responses import Responses
from rackserve.base.errors import RequestError
from rackserve.text.dsml_parser import CallStarted, ContentDelta
from tests.api.dialects.answers import PARTS, called, deltas, streamed, values, whole

BODY: dict[str, Any] = {
    "model": "tiny",
    "input": "hi",
    "instructions": "be brief",
    "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}, {"type": "web_search"}],
    "max_output_tokens": 50,
    "temperature": 0.5,
}


def without_times(resource: Any) -> Any:
    return {**resource, "completed_at": None}


@pytest.mark.parametrize("seed", range(20))
def test_the_last_event_holds_what_the_plain_answer_is(seed: int) -> None:
    call = called(Responses(), BODY)
    events = streamed(Responses(), call, deltas(seed=seed))
    assert events[-1]["type"] == "response.completed"
    assert without_times(events[-1]["response"]) == without_times(whole(Responses(), call, deltas(seed=seed + 1)))


def test_the_resource_is_what_specification_and_client_read() -> None:
    resource = whole(Responses(), called(Responses(), BODY), deltas())
    spec.ResponseResource.model_validate(resource)
    assert Response.model_validate(resource).output_text == "It is:"
    assert [item["type"] for item in resource["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert (
        resource["output"][2]["arguments"] == '{"at": "é"}'
        and resource["output"][3]["call_id"] != resource["output"][2]["call_id"]
    )
    assert resource["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert resource["usage"]["total_tokens"] == 19
    assert resource["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert (
        [tool["name"] for tool in resource["tools"]] == ["look"]
        and resource["temperature"] == 0.5
        and resource["store"] is False
    )


@pytest.mark.parametrize("seed", range(10))
def test_events_are_numbered_and_every_item_opens_grows_and_closes_in_order(seed: int) -> None:
    events = streamed(Responses(), called(Responses(), BODY), deltas(seed=seed))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for index in range(4):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added" and own[-1]["type"] == "response.output_item.done"
        grown = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        item = own[-1]["item"]
        assert grown == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert len({event["item_id"] for event in own if "item_id" in event} | {item["id"], own[0]["item"]["id"]}) == 1


def test_an_answer_cut_by_its_limit_is_incomplete() -> None:
    ending = Ending("length", 10, 0, 50, 1)
    parts = (*PARTS[:3], CallStarted(0, "look"))
    events = streamed(Responses(), called(Responses(), BODY), deltas(parts, ending))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item.get("status") for item in events[-1]["response"]["output"]] == [None, "completed", "incomplete"]


def test_a_lost_answer_fails_with_its_reason() -> None:
    reply = Responses().reply(called(Responses(), BODY))
    reply.events(Delta(0, (ContentDelta("a"),)))
    (event,) = values(reply.failure(RequestError("rank lost", code="unavailable", status=503)))
    assert event["type"] == "response.failed" and event["response"]["error"] == {"code": "unavailable", "message": "rank lost"}


def test_log_probabilities_stand_with_their_text() -> None:
    call = called(Responses(), {**BODY, "top_logprobs": 1})
    entry = TokenEntry(0, b"a", -0.5, ((b"a", -0.5),))
    resource = whole(Responses(), call, [Delta(0, (ContentDelta("a"),), (entry,), Ending("stop", 1, 0, 1, 1))])
    assert call.ask.logprobs == 1 and resource["output"][0]["content"][0]["logprobs"][0]["token"] == "a"
    assert msgspec.json.encode(resource)


@pytest.mark.parametrize("seed", range(10))
def test_the_log_probabilities_of_a_stream_are_those_of_the_text_when_it_is_done_reasoning_included(seed: int) -> None:
    """Tokens of the reasoning come before the text: what is known of them is told with its first piece, once."""
    call = called(Responses(), {**BODY, "top_logprobs": 1})
    given = deltas(seed=seed)
    scored = [
        msgspec.structs.replace(delta, entries=(TokenEntry(number, b"%d" % number, -0.5, ()),))
        for number, delta in enumerate(given)
    ]
    events = streamed(Responses(), call, scored)
    told = [entry["token"] for event in events for entry in event.get("logprobs", ()) if event["type"].endswith("text.delta")]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert told == [entry["token"] for entry in done["logprobs"]] and told[0] == "0"
    (text,) = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
    assert [entry["token"] for entry in text["content"][0]["logprobs"]] == [str(number) for number in range(len(scored))]
