"""The vendors' own clients: what they parse into their types is an answer."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

pytestmark = pytest.mark.model

PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
QUESTION = "What is the capital of France?"
ASKED = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def gpt(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=90, max_retries=0)


@pytest.fixture(scope="module")
def claude(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", timeout=90, max_retries=0)


def test_chat_streams_what_it_answers(gpt: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 30,
    }
    plain = gpt.chat.completions.create(**asked)
    chunks = list(gpt.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == plain.choices[0].message.content and "Paris" in streamed
    assert plain.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_a_chat_that_has_to_call_calls(gpt: openai.OpenAI, model: str) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "weather", "description": "weather of a city", "parameters": PARAMETERS},
    }
    asked: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": "Weather in Oslo?"}], "tools": [tool], "temperature": 0,
        "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100,
    }  # fmt: skip
    choice = gpt.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and set(json.loads(call.function.arguments)) == {"city"}
    parts = [c.choices[0].delta.tool_calls for c in gpt.chat.completions.create(**asked, stream=True) if c.choices]
    arguments = "".join(part.function.arguments or "" for calls in parts for part in calls or () if part.function)
    assert arguments == call.function.arguments
    history = [*asked["messages"], choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "cold"}]
    after = gpt.chat.completions.create(**{**asked, "messages": history, "tool_choice": "none"})
    assert after.choices[0].message.content and not after.choices[0].message.tool_calls


def test_an_answer_keeps_to_its_schema(gpt: openai.OpenAI, model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": PARAMETERS, "strict": True}}
    asked: list[Any] = [{"role": "user", "content": "Name a city."}]
    answer = gpt.chat.completions.create(model=model, messages=asked, response_format=form, max_tokens=60)
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("Paris", "Oslo")


def test_responses_stream_what_they_answer(gpt: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 400}
    plain = gpt.responses.create(**asked)
    with gpt.responses.stream(**asked) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert deltas == plain.output_text == final.output_text and "Paris" in deltas


def test_messages_stream_what_they_answer(claude: anthropic.Anthropic, model: str) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": 30,
        "messages": [{"role": "user", "content": QUESTION}],
        "extra_body": {"temperature": 0},  # its newest client has no argument for it
    }
    plain = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text, final = "".join(stream.text_stream), stream.get_final_message()
    (block,) = plain.content
    assert block.type == "text" and text == block.text
    assert [part.text for part in final.content if part.type == "text"] == [text]
    counted = claude.messages.count_tokens(model=model, messages=asked["messages"])
    assert counted.input_tokens == plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)


def test_a_message_that_has_to_use_a_tool_uses_it(claude: anthropic.Anthropic, model: str) -> None:
    asked: dict[str, Any] = {
        "model": model, "max_tokens": 100, "messages": [{"role": "user", "content": "Weather in Oslo?"}],
        "tools": [{"name": "weather", "input_schema": PARAMETERS}], "tool_choice": {"type": "tool", "name": "weather"},
    }  # fmt: skip
    answer = claude.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert use.name == "weather" and set(use.input) == {"city"}  # type: ignore[call-overload]


def test_errors_are_the_clients_own(gpt: openai.OpenAI, claude: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        gpt.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        gpt.completions.create(model=model, prompt="x", max_tokens=-1)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=[{"role": "user", "content": "x"}])


def test_scores_of_a_given_text_are_had_as_evaluations_ask_for_them(gpt: openai.OpenAI, model: str) -> None:
    """`echo` with log-probabilities, for one token or none beyond the prompt; the same cold and warm, by text and by ids."""
    prompt = "The capital of France is Paris"
    first = gpt.completions.create(model=model, prompt=prompt, echo=True, logprobs=1, max_tokens=0, temperature=0).choices[0]
    again = gpt.completions.create(model=model, prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0).choices[0]
    assert first.text == prompt and again.text.startswith(prompt) and first.logprobs is not None and again.logprobs is not None
    scores, warm = first.logprobs.token_logprobs, again.logprobs.token_logprobs
    assert scores is not None and warm is not None and first.logprobs.tokens is not None
    assert scores[0] is None and len(scores) == len(first.logprobs.tokens) and warm[: len(scores)] == scores
    assert "".join(first.logprobs.tokens) == prompt and scores[-1] is not None and scores[-1] > -3
