from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.text.hermes import write_tools
from rackserve.text.hermes_parser import HermesParser
from tests.text.reading import read

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_end_the_system_message_that_is_there() -> None:
    (system,) = write_tools([{"role": "system", "content": "S"}], [FUNCTION])
    assert system["content"].startswith("S\n\n# Tools") and json.dumps(FUNCTION) in system["content"]
    made, user = write_tools([{"role": "user", "content": "U"}], [FUNCTION])
    assert made["role"] == "system" and user == {"role": "user", "content": "U"}


def test_without_tools_nothing_is_added() -> None:
    messages = [{"role": "user", "content": "U", "name": "n"}]
    assert write_tools(messages, []) == messages


def test_neighbouring_results_are_one_message() -> None:
    results = [{"role": "tool", "content": text} for text in "ab"]
    written = write_tools([*results, {"role": "user", "content": "U"}, results[0]], [])
    assert [message["role"] for message in written] == ["user", "user", "user"]
    assert written[0]["content"] == "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"
    assert results[0] == {"role": "tool", "content": "a"}


_arguments = st.dictionaries(st.text(max_size=3), st.text(max_size=4) | st.integers() | st.lists(st.none()), max_size=3)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text("a <\n", max_size=6), st.lists(st.tuples(st.text(min_size=1, max_size=4), _arguments), min_size=1, max_size=3))
def test_what_is_written_is_read_back(content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    made = [call(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    (written,) = write_tools([{"role": "assistant", "content": content, "tool_calls": made}], [])
    message = read(HermesParser(), written["content"])
    assert message.calls == [[part["function"]["name"], part["function"]["arguments"]] for part in made]
    assert message.content == content or message.content == content + "\n"
    assert message.finished == list(range(len(calls))) and not message.malformed
