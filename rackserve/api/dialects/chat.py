"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rackserve.api.answer import Delta, TokenEntry
from rackserve.api.ask import Ask, Conversation
from rackserve.api.call import Call
from rackserve.api.dialects.body import parse
from rackserve.api.dialects.dialect import Event
from rackserve.api.dialects.openai import UNSUPPORTED, Count, GenerationBody, TopLogprobs
from rackserve.api.dialects.openai_replies import Json, OpenAiReply, chat_entry, event
from rackserve.api.errors import error_body
from rackserve.base.errors import RequestError


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1


class Chat:
    """The dialect of /v1/chat/completions."""

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Ask:
        body, unknown = parse(raw, ChatBody, UNSUPPORTED)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return msgspec.structs.replace(
            body.ask("chat", headers, unknown), conversation=Conversation(messages=body.messages or [])
        )

    def reply(self, call: Call) -> ChatReply:
        return ChatReply(call)

    def error_body(self, error: RequestError) -> bytes:
        return error_body(error)


class ChatReply(OpenAiReply):
    """A message for each choice."""

    kinds = ("chat.completion.chunk", "chat.completion")

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._opened: set[int] = set()

    def events(self, delta: Delta) -> list[Event]:
        events = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            events.append(event(self.chunk(delta.index, {"delta": {"role": "assistant", "content": ""}}, None)))
        if delta.text or delta.entries:
            content = {"delta": {"content": delta.text}}
            events.append(event(self.chunk(delta.index, content, _logprobs(delta.entries))))
        if delta.ending is not None:
            self.end(delta)
            events.append(event(self.chunk(delta.index, {"delta": {}}, None, delta.ending.finish)))
        return events

    def choice(self, deltas: Sequence[Delta]) -> Json:
        text = "".join(delta.text for delta in deltas)
        entries = tuple(entry for delta in deltas for entry in delta.entries)
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": _logprobs(entries)}


def _logprobs(entries: tuple[TokenEntry, ...]) -> Json | None:
    return {"content": [chat_entry(entry) for entry in entries], "refusal": None} if entries else None
