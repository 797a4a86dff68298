"""Whole streams of /v1/responses, event by event, against the open specification's types: of a model, and of every kind."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from rackserve.api.answer import Ending
from rackserve.api.dialects.responses import Responses
from tests.api.dialects.answers import PARTS, called, deltas, streamed
from tests.conformance.open_responses import validate

BODY: dict[str, Any] = {
    "model": "tiny",
    "input": "hi",
    "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
}


@pytest.mark.parametrize("seed", range(5))
def test_answers_with_reasoning_text_and_calls_are_as_specified(seed: int) -> None:
    kinds = validate(streamed(Responses(), called(Responses(), BODY), deltas(seed=seed)))
    assert kinds >= {"response.reasoning_text.delta", "response.function_call_arguments.done", "response.completed"}


def test_an_answer_that_was_cut_is_as_specified() -> None:
    cut = deltas(PARTS[:6], Ending("length", 10, 0, 50, 1))
    assert "response.incomplete" in validate(streamed(Responses(), called(Responses(), BODY), cut))


@pytest.mark.model
@pytest.mark.parametrize(
    "asked",
    [
        {"max_output_tokens": 20},
        {"max_output_tokens": 20, "top_logprobs": 1, "include": ["message.output_text.logprobs"]},
        {"max_output_tokens": 60, "tools": BODY["tools"], "tool_choice": "required", "parallel_tool_calls": False},
    ],
)
def test_what_a_model_answers_is_as_specified(asked: dict[str, Any], url: str, model: str) -> None:
    body = {"model": model, "input": "Name a city.", "temperature": 0, "stream": True, **asked}
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=90, trust_env=False)
    assert answer.status_code == 200
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    kinds = validate(events)
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert ("response.function_call_arguments.delta" in kinds) is ("tools" in asked)
