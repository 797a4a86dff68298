from __future__ import annotations

import jsonschema
import pytest

from rackserve.api.dialects import parts

TEXT = [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (
            parts.CHAT_MESSAGES["items"],
            [
                {"role": "user", "content": TEXT},
                {"role": "tool", "content": "r", "tool_call_id": "c"},
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            ],
            [
                {"role": "nobody", "content": "a"},
                {"role": "user", "content": None},
                {"role": "user", "content": [{"type": "image_url"}]},
            ],
        ),
        (
            parts.ITEMS["items"],
            [
                {"role": "user", "content": "a"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
                {"type": "web_search_call"},
            ],
            [{"type": "item_reference", "id": "x"}, {"type": None}, {"type": "function_call"}],
        ),
        (
            parts.MESSAGES["items"],
            [
                {"role": "user", "content": [*TEXT, {"type": "tool_result", "tool_use_id": "t", "content": TEXT}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            ],
            [{"role": "tool", "content": "a"}, {"role": "user", "content": [{"type": "image"}]}],
        ),
    ],
)  # fmt: skip
def test_what_agents_send_is_described_and_what_is_refused_is_not(
    schema: parts.Schema, taken: list[object], refused: list[object]
) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    assert all(validator.is_valid(value) for value in taken)
    assert not any(validator.is_valid(value) for value in refused)
