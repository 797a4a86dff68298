"""/v1/responses: the resource that an answer is, and the events of its growth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rackserve.api.answer import Delta, Ending
from rackserve.api.call import Call
from rackserve.api.dialects.dialect import Event
from rackserve.api.dialects.items import Change, Item, ItemList, call_id
from rackserve.api.dialects.openai_replies import Json, chat_entry
from rackserve.api.usage import usage_of
from rackserve.base.errors import RequestError

if TYPE_CHECKING:
    from rackserve.api.dialects.responses import ResponseBody


class ResponseReply:
    """The events and the body of one call, which has one choice."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._asked: ResponseBody = call.ask.extra
        self._items = ItemList()
        self._ending: Ending | None = None
        self._number = 0
        self._told = 0  # log-probabilities, which all stand with the first text

    def events(self, delta: Delta) -> list[Event]:
        """The events of the next delta; before the first the response is created."""
        events = []
        if not self._number:
            events += [self._event("response.created", response=self._resource("in_progress"))]
            events += [self._event("response.in_progress", response=self._resource("in_progress"))]
        for change in self._items.feed(delta):
            events += self._change(change)
        self._ending = delta.ending or self._ending
        return events

    def closing(self) -> list[Event]:
        """The event that holds the whole."""
        status = self._status()
        return [self._event(f"response.{status}", response=self._resource(status))]

    def body(self, deltas: Sequence[Delta]) -> bytes:
        """The resource that the last event of the stream would hold."""
        for delta in deltas:
            for _ in self._items.feed(delta):
                pass
            self._ending = delta.ending or self._ending
        return msgspec.json.encode(self._resource(self._status()))

    def failure(self, error: RequestError) -> list[Event]:
        """The response, failed."""
        told = {"code": error.code or "server_error", "message": str(error)}
        return [self._event("response.failed", response={**self._resource("failed"), "error": told})]

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return Event(msgspec.json.encode(event), kind)

    def _change(self, change: Change) -> list[Event]:
        item, place = change.item, {"output_index": change.index}
        named = {"item_id": self._name(change.index, item), **place}
        if change.begins:
            events = [self._event("response.output_item.added", **place, item=self._item(change.index, item, fresh=True))]
            if item.kind != "call":
                part = _part(Item(item.kind))
                events.append(self._event("response.content_part.added", **named, content_index=0, part=part))
            return events
        if change.ends:
            return self._end(change, named)
        if item.kind == "call":
            return [self._event("response.function_call_arguments.delta", **named, delta=change.text)]
        if item.kind == "reasoning":
            return [self._event("response.reasoning_text.delta", **named, content_index=0, delta=change.text)]
        return [self._text_event(named, item, change.text)]

    def _text_event(self, named: dict[str, Any], item: Item, text: str) -> Event:
        """More text, and the log-probabilities that are known since the last one: of what came before the text, too."""
        logprobs = [chat_entry(entry) for entry in item.entries[self._told :]]
        self._told = max(self._told, len(item.entries))
        return self._event("response.output_text.delta", **named, content_index=0, delta=text, logprobs=logprobs)

    def _end(self, change: Change, named: dict[str, Any]) -> list[Event]:
        item = change.item
        if item.kind == "call":
            done = self._event("response.function_call_arguments.done", **named, arguments=item.text, name=item.name)
            events = [done]
        else:
            rest = [self._text_event(named, item, "")] if len(item.entries) > self._told and item.kind == "text" else []
            kind = "response.reasoning_text.done" if item.kind == "reasoning" else "response.output_text.done"
            logprobs = {"logprobs": [chat_entry(entry) for entry in item.entries]} if item.kind == "text" else {}
            events = [
                *rest,
                self._event(kind, **named, content_index=0, text=item.text, **logprobs),
                self._event("response.content_part.done", **named, content_index=0, part=_part(item)),
            ]
        whole = self._item(change.index, item)
        return [*events, self._event("response.output_item.done", output_index=change.index, item=whole)]

    def _name(self, index: int, item: Item) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[item.kind]
        return f"{prefix}_{self._call.id.removeprefix('resp_')}_{index}"

    def _item(self, index: int, item: Item, *, fresh: bool = False) -> Json:
        status = "in_progress" if fresh else "completed" if item.whole else "incomplete"
        name = self._name(index, item)
        if item.kind == "call":
            called = {"call_id": call_id(self._call.id, index), "name": item.name, "arguments": item.text}
            return {"type": "function_call", "id": name, **called, "status": status}
        content = [] if fresh else [_part(item)]
        if item.kind == "reasoning":
            return {"type": "reasoning", "id": name, "summary": [], "content": content, "encrypted_content": None}
        return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}

    def _status(self) -> str:
        assert self._ending is not None, "a choice without an ending"
        return "incomplete" if self._ending.finish == "length" else "completed"

    def _resource(self, status: str) -> Json:
        asked, sampling = self._asked, self._call.ask.sampling
        return {
            "id": self._call.id,
            "object": "response",
            "created_at": self._call.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "model": self._call.model,
            "previous_response_id": None,
            "instructions": asked.instructions,
            "output": [self._item(index, item) for index, item in enumerate(self._items.items)],
            "tools": [_tool(tool) for tool in asked.tools or [] if tool.get("type") == "function"],
            "tool_choice": asked.tool_choice or "auto",
            "truncation": "disabled",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "text": {"format": (asked.text.format if asked.text else None) or {"type": "text"}},
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "top_logprobs": max(0, self._call.ask.logprobs),
            "temperature": sampling.temperature,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "usage": self._usage(),
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": asked.metadata or {},
            "safety_identifier": None,
            "prompt_cache_key": asked.prompt_cache_key,
        }

    def _usage(self) -> Json | None:
        if self._ending is None:
            return None
        used = usage_of([self._ending], 1)
        return {
            "input_tokens": used.prompt_tokens,
            "output_tokens": used.output_tokens,
            "total_tokens": used.prompt_tokens + used.output_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        }


def _part(item: Item) -> Json:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    logprobs = [chat_entry(entry) for entry in item.entries]
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": logprobs}


def _tool(tool: dict[str, Any]) -> Json:
    return {
        "type": "function",
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict"),
    }
