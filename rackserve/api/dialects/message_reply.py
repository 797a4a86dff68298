"""/v1/messages: the message that an answer is, and the events of its growth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rackserve.api.answer import Delta, Ending
from rackserve.api.call import Call
from rackserve.api.dialects.dialect import Event
from rackserve.api.dialects.items import Change, Item, ItemList, call_id
from rackserve.api.dialects.openai_replies import Json
from rackserve.api.usage import usage_of
from rackserve.base.errors import RequestError

_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def message_error(error: RequestError) -> Json:
    """An error as this dialect writes it; `param` and `code` are ours."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error), "param": error.param, "code": error.code}}


class MessageReply:
    """The events and the body of one call, which has one choice."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._items = ItemList()
        self._ending: Ending | None = None
        self._begun = False

    def events(self, delta: Delta) -> list[Event]:
        """The events of the next delta; before the first the message starts."""
        events = []
        if not self._begun:
            self._begun = True
            events.append(_event("message_start", message={**self._message([]), "usage": self._usage()}))
        for change in self._items.feed(delta):
            events += _change(change, self._call.id)
        self._ending = delta.ending or self._ending
        return events

    def closing(self) -> list[Event]:
        """How the message ended, and its end."""
        reason, sequence = self._stop()
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        return [_event("message_delta", delta=ended, usage=self._usage()), _event("message_stop")]

    def body(self, deltas: Sequence[Delta]) -> bytes:
        """The message."""
        for delta in deltas:
            for _ in self._items.feed(delta):
                pass
            self._ending = delta.ending or self._ending
        reason, sequence = self._stop()
        content = [_block(item, call_id(self._call.id, index)) for index, item in enumerate(self._items.items)]
        message = {**self._message(content), "stop_reason": reason, "stop_sequence": sequence, "usage": self._usage()}
        return msgspec.json.encode(message)

    def failure(self, error: RequestError) -> list[Event]:
        """The error as an event."""
        return [Event(msgspec.json.encode(message_error(error)), "error")]

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
        }

    def _stop(self) -> tuple[str, str | None]:
        assert self._ending is not None, "a choice without an ending"
        if self._ending.finish == "length":
            return "max_tokens", None
        if self._ending.stop is not None:
            return "stop_sequence", self._ending.stop
        return ("tool_use" if self._ending.num_calls else "end_turn"), None

    def _usage(self) -> Json:
        """Prompt tokens are those that had to be computed; the cached ones stand beside them, as this dialect has it."""
        prompt = sum(request.num_tokens for request in self._call.requests)
        used = None if self._ending is None else usage_of([self._ending], 1)
        cached = 0 if used is None else used.cached_tokens
        return {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 0 if used is None else used.output_tokens,
            "output_tokens_details": {"thinking_tokens": 0 if used is None else used.reasoning_tokens},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        }


def _event(kind: str, **fields: Any) -> Event:
    return Event(msgspec.json.encode({"type": kind, **fields}), kind)


def _change(change: Change, call: str) -> list[Event]:
    item, index = change.item, change.index
    if change.begins:
        fresh = Item(item.kind, name=item.name)
        return [_event("content_block_start", index=index, content_block=_block(fresh, call_id(call, index)))]
    if change.ends:
        signature = []
        if item.kind == "reasoning":  # clients send it back with the reasoning; there is nothing to sign here
            signature = [_event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": ""})]
        return [*signature, _event("content_block_stop", index=index)]
    grown = {
        "text": {"type": "text_delta", "text": change.text},
        "reasoning": {"type": "thinking_delta", "thinking": change.text},
        "call": {"type": "input_json_delta", "partial_json": change.text},
    }[item.kind]
    return [_event("content_block_delta", index=index, delta=grown)]


def _block(item: Item, name: str) -> Json:
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    if item.kind == "text":
        return {"type": "text", "text": item.text, "citations": None}
    try:
        arguments = msgspec.json.decode(item.text or "{}")
    except msgspec.DecodeError:  # cut off: what there is of it cannot be shown as a value
        arguments = {}
    return {"type": "tool_use", "id": name, "name": item.name, "input": arguments, "caller": {"type": "direct"}}
