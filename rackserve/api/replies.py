"""The JSON of answers: stream chunks and whole bodies of both endpoints, and the one author of usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rackserve.api.answer import Delta, Ending, TokenEntry
from rackserve.api.factory import Call

Json = dict[str, Any]

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def usage(endings: Sequence[Ending], n: int) -> Json:
    """The usage of a call from the endings of its choices in order: each prompt once (its first choice's cached tokens),
    output of all choices."""
    prompts = endings[::n]
    prompt_tokens = sum(ending.prompt_tokens for ending in prompts)
    output_tokens = sum(ending.output_tokens for ending in endings)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(ending.cached_tokens for ending in prompts)},
        "attempts": max(ending.attempts for ending in endings),
    }


class Reply:
    """The chunks and the body of one call."""

    __slots__ = ("_call", "_endings", "_opened")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._opened: set[int] = set()
        self._endings: dict[int, Ending] = {}

    def chunks(self, delta: Delta) -> list[Json]:
        """The stream chunks for one delta: the choice's opening if it is its first, text, finish."""
        chunks = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            if self._call.chat:
                chunks.append(self._chunk(delta.index, {"delta": {"role": "assistant", "content": ""}}))
        if delta.text or delta.entries:
            logprobs = self._logprobs(delta.entries)
            content: Json = {"delta": {"content": delta.text}} if self._call.chat else {"text": delta.text}
            chunks.append(self._chunk(delta.index, content, logprobs=logprobs))
        if delta.ending is not None:
            self._endings[delta.index] = delta.ending
            empty: Json = {"delta": {}} if self._call.chat else {"text": ""}
            chunks.append(self._chunk(delta.index, empty, finish=delta.ending.finish))
        return chunks

    def usage_chunk(self) -> Json:
        """The chunk without choices that tells the usage, once all choices have ended."""
        return {**self._head(), "choices": [], "usage": self._usage()}

    def body(self, deltas: Sequence[Delta]) -> Json:
        """The plain answer: what the stream of `deltas` would have shown, joined."""
        choices = []
        for index in range(len(self._call.requests)):
            own = [delta for delta in deltas if delta.index == index]
            ending = own[-1].ending
            assert ending is not None, "a choice without an ending"
            self._endings[index] = ending
            text = "".join(delta.text for delta in own)
            logprobs = self._logprobs(tuple(entry for delta in own for entry in delta.entries))
            content: Json = {"text": text}
            if self._call.chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": ending.finish})
        return {**self._head(whole=True), "choices": choices, "usage": self._usage()}

    def _usage(self) -> Json:
        return usage([self._endings[index] for index in range(len(self._call.requests))], self._call.n)

    def _head(self, *, whole: bool = False) -> Json:
        kind = "text_completion"
        if self._call.chat:
            kind = "chat.completion" if whole else "chat.completion.chunk"
        return {"id": self._call.id, "object": kind, "created": self._call.created, "model": self._call.model}

    def _chunk(self, index: int, content: Json, *, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head(), "choices": [choice]}
        if self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, entries: tuple[TokenEntry, ...]) -> Json | None:
        if not entries:
            return None
        if self._call.chat:
            return {"content": [_chat_entry(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [_spell(entry.raw) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [{_spell(raw): _finite(value) for raw, value in entry.top} for entry in entries],
            "text_offset": [entry.start for entry in entries],
        }


def _chat_entry(entry: TokenEntry) -> Json:
    top = [_alternative(raw, value) for raw, value in entry.top]
    return {**_alternative(entry.raw, entry.logprob), "top_logprobs": top}


def _alternative(raw: bytes, logprob: float) -> Json:
    return {"token": _spell(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _spell(raw: bytes) -> str:
    """A token as text; one that is no whole characters as `bytes:` and escapes, never as replacement marks."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if logprob == logprob else LOWEST_LOGPROB
