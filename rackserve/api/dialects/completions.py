"""/v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from rackserve.api.answer import Delta, TokenEntry
from rackserve.api.ask import Ask
from rackserve.api.call import Call
from rackserve.api.dialects.body import Table
from rackserve.api.dialects.dialect import Event
from rackserve.api.dialects.openai import HARMLESS, UNSUPPORTED, GenerationBody, TopLogprobs
from rackserve.api.dialects.openai_replies import Json, OpenAiReply, event, finite, spell
from rackserve.base.errors import RequestError

OF_CHATS: dict[str, tuple[Any, ...]] = {
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "max_completion_tokens": (),
    "messages": (),
    "parallel_tool_calls": (True,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
}
"""Fields of the other endpoint, with the values that ask for nothing."""


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT = {"anyOf": [_TEXT, _IDS, {"type": "array", "items": _TEXT, "minItems": 1}, {**_IDS, "items": _IDS}]}
"""What `prompts_of` takes, as a JSON schema."""


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """Body of /v1/completions. `prompt`: a text, a list of token ids, or a list of either.

    echo: the answer begins with the prompt; with max_tokens 0 it is the prompt alone. logprobs then cover the prompt too.
    """

    prompt: Annotated[Any, Meta(extra_json_schema=PROMPT)] = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None

    @property
    def num_top_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


COMPLETION = Table(CompletionBody, ("prompt",), UNSUPPORTED | OF_CHATS, HARMLESS)


class Completions:
    """The dialect of /v1/completions."""

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Ask:
        body, unknown, ignored = COMPLETION.read(raw)
        if body.max_tokens == 0 and not body.echo:
            raise RequestError("max_tokens must be at least 1, or 0 with echo: true", param="max_tokens", code="invalid_value")
        ask = body.ask("completion", headers, unknown, ignored)
        wanted = max(ask.prompt_logprobs, ask.logprobs if body.echo else -1)
        return msgspec.structs.replace(
            ask,
            prompts=tuple(prompts_of(body.prompt)),
            echo=bool(body.echo),
            prompt_logprobs=wanted,
            extra=body.prompt_logprobs,
        )

    def reply(self, call: Call) -> CompletionReply:
        return CompletionReply(call)


class CompletionReply(OpenAiReply):
    """Text of each choice."""

    kinds = ("text_completion", "text_completion")

    def events(self, delta: Delta) -> list[Event]:
        events = []
        if delta.text or delta.entries:
            events.append(event(self.chunk(delta.index, {"text": delta.text}, self._logprobs(delta.entries))))
        if delta.ending is not None:
            self.end(delta)
            events.append(event(self.chunk(delta.index, {"text": ""}, None, delta.ending.finish)))
        return events

    def choice(self, deltas: Sequence[Delta]) -> Json:
        entries = tuple(entry for delta in deltas for entry in delta.entries)
        choice: Json = {"text": "".join(delta.text for delta in deltas), "logprobs": self._logprobs(entries)}
        if self.call.ask.extra is not None:
            choice["prompt_logprobs"] = self.prompt_logprobs(deltas)
        return choice

    @staticmethod
    def _logprobs(entries: tuple[TokenEntry, ...]) -> Json | None:
        if not entries:
            return None
        return {
            "tokens": [spell(entry.raw) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [{spell(raw): finite(value) for raw, value in entry.top} for entry in entries],
            "text_offset": [entry.start for entry in entries],
        }


def prompts_of(value: Any) -> list[str] | list[list[int]]:
    """The prompts of a completion, all texts or all lists of token ids. Raises RequestError (param `prompt`)."""
    if value is None or value in ("", []):
        raise RequestError("prompt must not be empty", param="prompt", code="empty_prompt")
    single = isinstance(value, str) or (isinstance(value, list) and isinstance(value[0], int))
    try:
        prompts = msgspec.convert([value] if single else value, list[str] | None)
    except msgspec.ValidationError:
        try:
            return _filled(msgspec.convert([value] if single else value, list[list[int]]))
        except msgspec.ValidationError as error:
            raise RequestError(
                "prompt must be a string, a list of token ids, or a list of either (not mixed)", param="prompt"
            ) from error
    return _filled(prompts or [])


Prompts = TypeVar("Prompts", list[str], list[list[int]])


def _filled(prompts: Prompts) -> Prompts:
    if not all(prompts):
        raise RequestError("prompt must not be empty", param="prompt", code="empty_prompt")
    return prompts
