"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rackserve.api.answer import Delta, TokenEntry
from rackserve.api.ask import Ask, Conversation
from rackserve.api.call import Call
from rackserve.api.dialects import parts
from rackserve.api.dialects.body import Table
from rackserve.api.dialects.dialect import Event
from rackserve.api.dialects.formats import constraint_of_format
from rackserve.api.dialects.items import call_id, items_of
from rackserve.api.dialects.openai import HARMLESS, UNSUPPORTED, Count, GenerationBody, TopLogprobs
from rackserve.api.dialects.openai_replies import Json, OpenAiReply, chat_entry, event
from rackserve.api.dialects.tools import sort_out
from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint
from rackserve.text.dsml_parser import ArgumentsDelta, CallStarted, ContentDelta, OutputDelta, ReasoningDelta


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """Body of /v1/chat/completions.

    tools                   functions; tools of other kinds are left out
    parallel_tool_calls     false: an answer that has to call makes one call (one that may call is free to make more)
    response_format         what form the content has; the engine keeps to it
    reasoning_effort        how hard to reason, as the model knows it; "none": not at all
    chat_template_kwargs    `thinking` or `enable_thinking`: whether to reason
    continue_final_message  the answer goes on in the last message, the assistant's
    """

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, extra_json_schema={parts.KEY: parts.CHAT_MESSAGES})] | None = (
        None
    )
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[dict[str, Any]], Meta(extra_json_schema={parts.KEY: parts.CHAT_TOOLS})] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, Meta(extra_json_schema={parts.KEY: parts.CHAT_TOOL_CHOICE})] = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[dict[str, Any] | None, Meta(extra_json_schema={parts.KEY: parts.CHAT_FORMAT})] = None
    reasoning_effort: str | int | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    def constraint(self) -> Constraint | None:
        first, second = super().constraint(), constraint_of_format(self.response_format, "response_format")
        if first is not None and second is not None:
            raise RequestError("response_format and structured_outputs exclude each other", param="response_format")
        return first or second

    def conversation(self) -> tuple[Conversation, list[str]]:
        """The prompt, and the tools that were left out. Raises RequestError naming the field at fault."""
        options = self.chat_template_kwargs or TemplateOptions()
        go_on = bool(self.continue_final_message)
        if self.add_generation_prompt is not None and self.add_generation_prompt == go_on:
            text = "add_generation_prompt must be the opposite of continue_final_message"
            raise RequestError(text, param="add_generation_prompt")
        if go_on and (self.messages or [{}])[-1].get("role") != "assistant":
            text = "continue_final_message needs a last message of the assistant"
            raise RequestError(text, param="continue_final_message")
        given = self.tools or []
        tools, skipped = sort_out(given, [tool.get("type", "function") for tool in given], "function")
        conversation = Conversation(
            messages=self.messages or [],
            tools=[tool for _, tool in tools],
            tool_choice=_tool_choice(self.tool_choice),
            parallel=self.parallel_tool_calls is not False,
            response_format=self.response_format,
            reasoning_effort=self.reasoning_effort,
            thinking=options.thinking if options.enable_thinking is None else options.enable_thinking,
            continue_last=go_on,
        )
        return conversation, skipped


class TemplateOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of `chat_template_kwargs` is known."""

    thinking: bool | None = None
    enable_thinking: bool | None = None


def _tool_choice(choice: str | dict[str, Any] | None) -> str:
    if choice is None or choice in ("auto", "none", "required"):
        return str(choice or "auto")
    function = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return f"function:{function['name']}"
    text = 'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
    raise RequestError(text, param="tool_choice")


CHAT = Table(ChatBody, ("messages",), UNSUPPORTED | {"echo": (False,), "prompt": ()}, HARMLESS)


class Chat:
    """The dialect of /v1/chat/completions."""

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Ask:
        body, unknown, ignored = CHAT.read(raw)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        both = body.max_tokens, body.max_completion_tokens
        if None not in both and both[0] != both[1]:
            text = f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) differ; give one of them"
            raise RequestError(text, param="max_completion_tokens")
        conversation, skipped = body.conversation()
        ask = body.ask("chat", headers, unknown, ignored)
        return msgspec.structs.replace(
            ask, conversation=conversation, ignored=(*ask.ignored, *skipped), extra=body.prompt_logprobs
        )

    def reply(self, call: Call) -> ChatReply:
        return ChatReply(call)


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
        logprobs = _logprobs(delta.entries)
        for part in delta.parts or ((ContentDelta(""),) if logprobs else ()):
            change = self._change(delta.index, part)
            if change is not None:
                events.append(event(self.chunk(delta.index, {"delta": change}, logprobs)))
                logprobs = None
        if delta.ending is not None:
            self.end(delta)
            events.append(event(self.chunk(delta.index, {"delta": {}}, None, self.finish([delta]))))
        return events

    def choice(self, deltas: Sequence[Delta]) -> Json:
        items = items_of(deltas)
        text = "".join(item.text for item in items if item.kind == "text")
        reasoning = "".join(item.text for item in items if item.kind == "reasoning")
        calls = [item for item in items if item.kind == "call"]
        message: Json = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
            "annotations": [],
        }
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = [
                self._call(deltas[0].index, number, called.name, called.text) for number, called in enumerate(calls)
            ]
        entries = tuple(entry for delta in deltas for entry in delta.entries)
        choice: Json = {"message": message, "logprobs": _logprobs(entries)}
        if self.call.ask.extra is not None:
            choice["prompt_logprobs"] = self.prompt_logprobs(deltas)
        return choice

    def finish(self, deltas: Sequence[Delta]) -> str:
        ending = self.ending(deltas[-1].index)
        return "tool_calls" if ending.finish == "stop" and ending.num_calls else ending.finish

    def _change(self, index: int, part: OutputDelta) -> Json | None:
        """The delta of a message; both names of reasoning are in use among clients."""
        match part:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning": text, "reasoning_content": text}
            case CallStarted(number, name):
                return {"tool_calls": [{"index": number, **self._call(index, number, name, "")}]}
            case ArgumentsDelta(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}
            case _:
                return None

    def _call(self, index: int, number: int, name: str, arguments: str) -> Json:
        function = {"name": name, "arguments": arguments}
        return {"id": call_id(f"{self.call.id}{index}", number), "type": "function", "function": function}


def _logprobs(entries: tuple[TokenEntry, ...]) -> Json | None:
    return {"content": [chat_entry(entry) for entry in entries], "refusal": None} if entries else None
