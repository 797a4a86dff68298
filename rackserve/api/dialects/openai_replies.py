"""What the answers of both OpenAI generation endpoints share: heads, chunks, usage, how tokens are spelled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from rackserve.api.answer import Delta, Ending, TokenEntry
from rackserve.api.call import Call
from rackserve.api.dialects.dialect import Event
from rackserve.api.errors import error_body
from rackserve.api.usage import usage_of
from rackserve.base.errors import RequestError
from rackserve.base.step import TokenLogprobs
from rackserve.text.tokenizer import unpack

Json = dict[str, Any]

DONE = Event(b"[DONE]")

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def event(value: Json) -> Event:
    """`value` as an event without name."""
    return Event(msgspec.json.encode(value))


def usage(endings: Sequence[Ending], n: int) -> Json:
    """The usage of a call from the endings of its choices in order, as this dialect writes it."""
    used = usage_of(endings, n)
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.prompt_tokens + used.output_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "attempts": used.attempts,
    }


class OpenAiReply(ABC):
    """The chunks and the body of one call. `kinds`: names of a chunk and of a body."""

    kinds: ClassVar[tuple[str, str]]

    def __init__(self, call: Call) -> None:
        self.call = call
        self._endings: dict[int, Ending] = {}

    @abstractmethod
    def events(self, delta: Delta) -> list[Event]:
        """What the stream shows of the next delta."""

    @abstractmethod
    def choice(self, deltas: Sequence[Delta]) -> Json:
        """The fields of a whole choice that depend on the endpoint."""

    def closing(self) -> list[Event]:
        """The usage, if it was asked for, and the end mark."""
        if not self.call.ask.usage:
            return [DONE]
        return [event({**self._head(self.kinds[0]), "choices": [], "usage": self._usage()}), DONE]

    def failure(self, error: RequestError) -> list[Event]:
        """The error as an event. No end mark follows: the answer is not whole."""
        return [Event(error_body(error))]

    def body(self, deltas: Sequence[Delta]) -> bytes:
        """The plain answer: what the stream of `deltas` would have shown, joined."""
        choices = []
        for index in range(len(self.call.requests)):
            own = [delta for delta in deltas if delta.index == index]
            self.end(own[-1])
            choices.append({"index": index, **self.choice(own), "finish_reason": self.finish(own)})
        return msgspec.json.encode({**self._head(self.kinds[1]), "choices": choices, "usage": self._usage()})

    def end(self, delta: Delta) -> None:
        """Remember how a choice ended: `delta` is its last."""
        assert delta.ending is not None, "a choice without an ending"
        self._endings[delta.index] = delta.ending

    def ending(self, index: int) -> Ending:
        """How choice `index` ended."""
        return self._endings[index]

    def finish(self, deltas: Sequence[Delta]) -> str:
        """The finish reason of a whole choice."""
        return self.ending(deltas[-1].index).finish

    def chunk(self, index: int, content: Json, logprobs: Json | None, finish: str | None = None) -> Json:
        """One chunk of choice `index`."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head(self.kinds[0]), "choices": [choice]}
        if self.call.ask.usage:
            chunk["usage"] = None
        return chunk

    def prompt_logprobs(self, deltas: Sequence[Delta]) -> list[Json | None]:
        """For each token of the prompt the token and its likeliest alternatives by id; None for the first."""
        index = deltas[-1].index
        ids = unpack(self.call.requests[index].tokens)[1:]
        pairs = zip(ids, self._endings[index].prompt_logprobs, strict=True)
        return [None, *(_by_id(token, logprobs) for token, logprobs in pairs)]

    def _usage(self) -> Json:
        return usage([self._endings[index] for index in range(len(self.call.requests))], self.call.ask.n)

    def _head(self, kind: str) -> Json:
        return {"id": self.call.id, "object": kind, "created": self.call.created, "model": self.call.model}


def _by_id(token: int, logprobs: TokenLogprobs) -> Json:
    ranked = {str(other): {"logprob": finite(value), "rank": rank} for rank, (other, value) in enumerate(logprobs.top, 1)}
    return {str(token): {"logprob": finite(logprobs.logprob), "rank": None}, **ranked}


def chat_entry(entry: TokenEntry) -> Json:
    """Log-probabilities of one token as the chat endpoint writes them."""
    return {**_alternative(entry.raw, entry.logprob), "top_logprobs": [_alternative(raw, value) for raw, value in entry.top]}


def _alternative(raw: bytes, logprob: float | None) -> Json:
    return {"token": spell(raw), "logprob": finite(logprob), "bytes": list(raw)}


def spell(raw: bytes) -> str:
    """A token as text; one that is no whole characters as `bytes:` and escapes, never as replacement marks."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float | None) -> float | None:
    """`logprob`, or the lowest there is; None stays."""
    if logprob is None:
        return None
    return max(logprob, LOWEST_LOGPROB) if logprob == logprob else LOWEST_LOGPROB
