from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rackserve.api.ask import Ask
from rackserve.api.dialects.responses import Responses
from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint


def ask(**fields: Any) -> Ask:
    return Responses().parse(msgspec.json.encode({"model": "tiny", "input": "hi", **fields}), {"session-id": "s1"})


def messages(items: list[Any]) -> list[Any]:
    conversation = ask(input=items).conversation
    assert conversation is not None
    return conversation.messages


def test_a_text_is_one_user_message_behind_the_instructions() -> None:
    found = ask(instructions="be brief").conversation
    assert found is not None
    assert found.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_items_become_messages_with_their_calls_and_results() -> None:
    assert messages(
        [
            {"type": "message", "role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "r1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "r2"}]},
            {"type": "web_search_call", "id": "w"},
        ]
    ) == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "r1"},
        {"role": "tool", "tool_call_id": "c2", "content": "r2"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(**fields)
    assert caught.value.param == param and caught.value.status == 400


def test_tools_of_other_kinds_are_left_out_and_told() -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}, {"type": "local_shell"}]
    found = ask(tools=tools, store=True)
    assert found.conversation is not None
    assert found.conversation.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert set(found.ignored) == {"store", "tools[0]:web_search", "tools[2]:local_shell"} and found.unknown == ()


def test_every_field_has_its_effect() -> None:
    found = ask(
        max_output_tokens=5, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1, top_logprobs=2, seed=3,
        stream=True, cache_salt="t", reasoning={"effort": "low"}, tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "null"}}}, new_field=1,
    )  # fmt: skip
    sampling, talk = found.sampling, found.conversation
    assert talk is not None
    assert (found.max_tokens, found.seed, found.logprobs, found.stream, found.cache_salt) == (5, 3, 2, True, "t")
    assert (sampling.temperature, sampling.top_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.9, 1, -1)
    assert sampling.constraint == Constraint("json_schema", '{"type":"null"}')
    assert (talk.reasoning_effort, talk.tool_choice, found.session, found.unknown) == (
        "low",
        "function:f",
        "s1",
        ("new_field",),
    )


def test_a_session_is_taken_from_where_clients_put_it() -> None:
    raw = msgspec.json.encode({"model": "m", "input": "x", "prompt_cache_key": "k"})
    assert Responses().parse(raw, {}).session == "k" and Responses().parse(raw, {"session-id": "h"}).session == "h"
