"""The shapes of plain answers: what clients may rely on. Writers make dicts; tests hold each answer to its shape, strictly."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Json = dict[str, Any]
Count = Annotated[int, Meta(ge=0)]


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object that has these fields and no others."""


class ErrorDetail(Shape, frozen=True):
    """What went wrong. `param`: the field at fault; `code`: the reason for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Shape, frozen=True):
    """The body of an error."""

    error: ErrorDetail


class MessagesError(Shape, frozen=True):
    """The body of an error below /v1/messages."""

    type: Literal["error"]
    error: ErrorDetail


class CachedTokens(Shape, frozen=True):
    """Of the prompt's tokens, those that were not computed."""

    cached_tokens: Count


class ReasoningTokens(Shape, frozen=True):
    """Of the output tokens, those of the reasoning."""

    reasoning_tokens: Count


class OpenAiUsage(Shape, frozen=True):
    """What a call used. `attempts`: how often it had to be placed."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens
    attempts: Annotated[int, Meta(ge=1)]


class Alternative(Shape, frozen=True):
    """A token that might have been drawn."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class TokenScore(Alternative, frozen=True):
    """A token that was drawn."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Shape, frozen=True):
    """Log-probabilities of the tokens of a choice."""

    content: list[TokenScore]
    refusal: None


class CalledFunction(Shape, frozen=True):
    """`arguments`: JSON text."""

    name: str
    arguments: str


class ToolCall(Shape, frozen=True):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape, frozen=True):
    """An answer. Both names of the reasoning are in use among clients."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Json]
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Shape, frozen=True):
    """One of `n`."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_logprobs: list[dict[str, Json] | None] | UnsetType = UNSET


class ChatAnswer(Shape, frozen=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAiUsage


class TextLogprobs(Shape, frozen=True):
    """Log-probabilities of the tokens of a choice, as parallel lists. The first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class TextChoice(Shape, frozen=True):
    """One of prompts x `n`."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: list[dict[str, Json] | None] | UnsetType = UNSET


class TextAnswer(Shape, frozen=True):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: OpenAiUsage


class MessageUsage(Shape, frozen=True):
    """What a message used. `input_tokens`: those that had to be computed."""

    input_tokens: Count
    cache_read_input_tokens: Count
    cache_creation_input_tokens: Count
    cache_creation: dict[str, Count]
    output_tokens: Count
    output_tokens_details: dict[str, Count]
    server_tool_use: None
    service_tier: str
    inference_geo: None


class MessageAnswer(Shape, frozen=True):
    """The answer of /v1/messages. `content`: blocks of text, thinking and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage


class InputDetails(Shape, frozen=True):
    """Of the input tokens, those that were not computed."""

    cached_tokens: Count
    cache_write_tokens: Count


class ResponseUsage(Shape, frozen=True):
    """What a response used."""

    input_tokens: Count
    output_tokens: Count
    total_tokens: Count
    input_tokens_details: InputDetails
    output_tokens_details: ReasoningTokens


class ResponseAnswer(Shape, frozen=True):
    """The answer of /v1/responses. `output`: items of kinds message, reasoning and function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    incomplete_details: Json | None
    error: None
    model: str
    previous_response_id: None
    instructions: str | None
    output: list[Json]
    tools: list[Json]
    tool_choice: str | Json
    truncation: str
    parallel_tool_calls: bool
    text: Json
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: Count
    temperature: float
    reasoning: Json
    usage: ResponseUsage
    max_output_tokens: int | None
    max_tool_calls: None
    store: bool
    background: bool
    service_tier: str
    metadata: Json
    safety_identifier: None
    prompt_cache_key: str | None


class CountAnswer(Shape, frozen=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: Count


class TokenizeAnswer(Shape, frozen=True):
    """The answer of /tokenize. `token_strs`: if they were asked for."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizeAnswer(Shape, frozen=True):
    """The answer of /detokenize."""

    prompt: str


class ModelEntry(Shape, frozen=True):
    """A model that is served. `max_model_len`: positions in its context, prompt and output together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Count


class ModelList(Shape, frozen=True):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]


class HealthAnswer(msgspec.Struct, frozen=True):
    """How the server is. There is more for those who hold a key, which is for people and no part of the contract."""

    live: bool
    ready: bool | UnsetType = UNSET
    phase: str | UnsetType = UNSET
