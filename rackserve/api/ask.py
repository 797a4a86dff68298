"""What a client asks for, whatever dialect it said it in: before any token is known."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rackserve.base.request import SamplingParams
from rackserve.text.chat import Message


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt made of messages in the chat-completions shape, whatever shape they came in.

    tools              function tools in the chat-completions shape; those of other kinds are left out before
    tool_choice        "auto", "none", "required" or the name of a function after "function:"
    parallel           an answer that has to call may make several calls
    response_format    in the chat-completions shape, or None
    reasoning_effort   as the client gave it; None: the model's default
    thinking           whether to reason before answering; None: the server's default
    continue_last      the answer goes on in the last message, which is the assistant's
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    tool_choice: str = "auto"
    parallel: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | int | None = None
    thinking: bool | None = None
    continue_last: bool = False


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request to generate.

    field            where its prompt was: named by errors about the prompt
    prompts          texts or token ids; empty when there is a conversation
    n                choices for each prompt
    max_tokens       output tokens of a choice; None: the room left in the context; 0: the echoed prompt alone
    stops            stop strings
    stop_token_ids   tokens that end the answer besides those of the model
    bad_words        texts that may not come up; the sampling gets their tokens later
    sampling         of the first choice; its seed is `seed`, or drawn where that is None
    logprobs         alternatives to report for each output token; -1: no log-probabilities at all
    prompt_logprobs  the same for the prompt's tokens
    echo             the answer begins with the prompt
    usage            a stream ends with the usage (the other forms always have it)
    session          the conversation this belongs to; empty: unknown
    unknown          fields nobody knows, let through without effect: told in a header, too
    ignored          what is known, has no effect here and harms nobody: told in a header
    """

    kind: Literal["completion", "chat", "response", "message"]
    field: str
    model: str | None = None
    prompts: tuple[str | list[int], ...] = ()
    conversation: Conversation | None = None
    n: int = 1
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    sampling: SamplingParams = SamplingParams()
    seed: int | None = None
    logprobs: int = -1
    prompt_logprobs: int = -1
    echo: bool = False
    ignore_eos: bool = False
    stream: bool = False
    usage: bool = True
    session: str = ""
    cache_salt: str = ""
    unknown: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    extra: Any = None
    """What the dialect's own reply needs besides (a parsed body, for example)."""
