from __future__ import annotations

from typing import Any

import pytest

from rackserve.base.errors import RequestError
from rackserve.text.messages import Block, ToolCall, Turn, read_json_text, read_tools, read_turns

ASK = {"role": "user", "content": "q"}


def calls(*ids: str, **function: Any) -> dict[str, Any]:
    made = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}", **function}} for name in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(call_id: Any, content: Any = "R") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def texts(turns: list[Turn]) -> list[tuple[str, list[str]]]:
    return [(turn.role, [block.text for block in turn.blocks]) for turn in turns]


def test_user_and_tool_messages_in_a_row_are_one_turn() -> None:
    messages = [ASK, calls("1"), result("1"), ASK, {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]
    assert texts(read_turns(messages)) == [("user", ["q"]), ("assistant", []), ("user", ["R", "q", "a", "b"])]


def test_a_turn_with_a_task_takes_nothing_more() -> None:
    turns = read_turns([ASK, {**ASK, "task": "title"}, ASK])
    assert [(turn.task, len(turn.blocks)) for turn in turns] == [("title", 2), (None, 1)]


def test_results_stand_in_the_order_of_their_calls_among_their_own_places() -> None:
    turns = read_turns([calls("1", "2", "3"), result("3", "R3"), ASK, result("1", "R1"), result("2", "R2")])
    assert turns[1].blocks == [Block("R1", "1"), Block("q"), Block("R2", "2"), Block("R3", "3")]


def test_the_order_is_that_of_the_calls_just_before() -> None:
    turns = read_turns(
        [calls("1", "2"), result("2", "b"), result("1", "a"), calls("2", "1"), result("1", "a"), result("2", "b")]
    )
    assert [turn[1] for turn in texts(turns)] == [[], ["a", "b"], [], ["b", "a"]]


def test_text_parts_of_a_result_are_paragraphs() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_turns([calls("1"), result("1", parts)])[1].blocks == [Block("a\n\nb", "1")]


@pytest.mark.parametrize("arguments", ['{"x": {"y": [1, null]}}', {"x": {"y": [1, None]}}])
def test_arguments_may_be_text_or_an_object(arguments: Any) -> None:
    (turn,) = read_turns([calls("1", arguments=arguments)])
    assert turn.calls == (ToolCall("1", "f", {"x": {"y": [1, None]}}),)


@pytest.mark.parametrize("arguments", ["", " "])
def test_empty_arguments_are_none_at_all(arguments: str) -> None:
    assert read_turns([calls("1", arguments=arguments)])[0].calls[0].arguments == {}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_has_two_names(name: str) -> None:
    assert read_turns([{"role": "assistant", "content": "a", name: "r"}])[0].reasoning == "r"


TOOL_CALL = "messages[1].tool_calls[0]"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[1].role"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "system", "content": None}, "messages[1].content"),
        ({"role": "latest_reminder"}, "messages[1].content"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[1].content"),
        ({"role": "user", "content": "x", "task": "cook"}, "messages[1].task"),
        ({"role": "user", "content": "x", "task": ["title"]}, "messages[1].task"),
        ({"role": "assistant", "content": "x", "task": "title"}, "messages[1].task"),
        ({"role": "assistant", "content": 3}, "messages[1].content"),
        ({"role": "assistant", "content": "x", "reasoning_content": ["r"]}, "messages[1].reasoning_content"),
        ({"role": "assistant", "content": "x", "reasoning": 1}, "messages[1].reasoning"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": ["f"]}, TOOL_CALL),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, TOOL_CALL),
        (calls("1", name=None), f"{TOOL_CALL}.function.name"),
        (calls("1", name='a"b'), f"{TOOL_CALL}.function.name"),
        (calls("1", arguments=None), f"{TOOL_CALL}.function.arguments"),
        (calls("1", arguments="{"), f"{TOOL_CALL}.function.arguments"),
        (calls("1", arguments="[1]"), f"{TOOL_CALL}.function.arguments"),
        (calls("1", arguments='"{}"'), f"{TOOL_CALL}.function.arguments"),
        (calls("1", arguments='{"x": NaN}'), f"{TOOL_CALL}.function.arguments"),
        (calls("1", arguments="[" * 100_000), f"{TOOL_CALL}.function.arguments"),
        (calls("1", arguments={'a"': 1}), f"{TOOL_CALL}.function.arguments"),
        ({"role": "assistant", "tool_calls": [{"id": 7, "function": {"name": "f", "arguments": "{}"}}]}, f"{TOOL_CALL}.id"),
        (result(None), "messages[1].tool_call_id"),
        (result(""), "messages[1].tool_call_id"),
        (result(3), "messages[1].tool_call_id"),
        (result("unknown"), "messages[1].tool_call_id"),
        (result("0", None), "messages[1].content"),
        ({"role": "system", "content": "", "tools": "f"}, "messages[1].tools"),
        ({"role": "system", "content": "", "tools": [{"type": "web_search"}]}, "messages[1].tools"),
        ({"role": "system", "content": "", "tools": [{"function": {}}]}, "messages[1].tools[0].function.name"),
        ({"role": "developer", "content": "", "response_format": "json"}, "messages[1].response_format"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_turns([calls("0"), message])
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert len(str(caught.value)) < 300


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one"):
        read_turns([])


def test_thousands_of_results_are_read_in_one_pass() -> None:
    names = [f"call{number}" for number in range(4000)]
    turns = read_turns([calls(*names), *(result(name, name) for name in reversed(names))])
    assert [block.text for block in turns[1].blocks] == names


def test_tools_are_their_function_objects() -> None:
    assert read_tools("tools", [{"type": "function", "function": {"name": "ns::f", "strict": True}}]) == [
        {"name": "ns::f", "strict": True}
    ]
    assert read_tools("tools", None) == []


@pytest.mark.parametrize("text", ["", "nul", "NaN", "-Infinity", "{'a': 1}", "[" * 100_000, "1" * 5000, "[1] 2"])
def test_what_is_not_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json_text(text)
