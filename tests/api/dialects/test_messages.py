from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rackserve.api.ask import Ask
from rackserve.api.dialects.messages import Messages
from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint

RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]}


def ask(*, counting: bool = False, **fields: Any) -> Ask:
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    return Messages(counting=counting).parse(msgspec.json.encode({k: v for k, v in body.items() if v is not None}), {})


def messages(**fields: Any) -> list[Any]:
    conversation = ask(**fields).conversation
    assert conversation is not None
    return conversation.messages


def test_blocks_become_messages_and_results_answer_before_new_text() -> None:
    assert messages(
        system=[{"type": "text", "text": "s1", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "s2"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "c"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "text", "text": "d"}, RESULT]},
        ],
    ) == [
        {"role": "system", "content": "s1\n\ns2"},
        {"role": "user", "content": "a\n\nb"},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "r"},
        {"role": "user", "content": "d"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"container": "x"}, "container"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(**fields)
    assert caught.value.param == param and caught.value.status == 400


def test_every_field_has_its_effect() -> None:
    found = ask(
        temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END"], stream=True, seed=3, cache_salt="t",
        thinking={"type": "enabled", "budget_tokens": 100},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "null"}}},
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}},
               {"type": "bash_20250124", "name": "bash"}],
        tool_choice={"type": "any"}, metadata={"user_id": "u1"}, service_tier="auto", new_field=1,
    )  # fmt: skip
    sampling, talk = found.sampling, found.conversation
    assert talk is not None
    assert (sampling.temperature, sampling.top_p, sampling.top_k, found.stops, found.stream) == (0.5, 0.9, 4, ("END",), True)
    assert sampling.constraint == Constraint("json_schema", '{"type":"null"}')
    assert talk.tools == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": "d"}}]
    assert (talk.thinking, talk.reasoning_effort, talk.tool_choice) == (True, "low", "required")
    assert (found.session, found.max_tokens, found.seed, found.cache_salt) == ("u1", 9, 3, "t")
    told = {"service_tier", "tools[1]:bash_20250124", "thinking.budget_tokens"}
    assert set(found.ignored) == told and found.unknown == ("new_field",)


def test_counting_needs_no_limit_and_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    assert ask(counting=True, max_tokens=None).max_tokens is None
    talk = ask(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}]).conversation
    assert talk is not None and talk.continue_last
