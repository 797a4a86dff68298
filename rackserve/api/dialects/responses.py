"""/v1/responses: what the body asks for. Stateless: nothing is stored, whatever `store` says, and the answer says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rackserve.api.ask import Ask, Conversation
from rackserve.api.call import Call
from rackserve.api.dialects import parts
from rackserve.api.dialects.body import Table
from rackserve.api.dialects.formats import constraint_of_format
from rackserve.api.dialects.openai import MAX_TOP_LOGPROBS, Count, Seed, Session, session_of
from rackserve.api.dialects.response_reply import ResponseReply
from rackserve.api.dialects.tools import sort_out
from rackserve.base.errors import RequestError
from rackserve.base.request import SamplingParams
from rackserve.text.chat import Message

LOGPROBS = "message.output_text.logprobs"
"""What `include` can ask for here."""

NOT_HERE: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
"""Fields that need what this server does not keep, and the values that ask for nothing."""

HARMLESS = frozenset(
    {
        "client_metadata", "max_tool_calls", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "stream_options", "user",
    }
)  # fmt: skip
"""Fields that change nothing a client could miss."""


class Reasoning(msgspec.Struct, frozen=True):
    """`effort`: how hard to reason. Summaries are not made: the reasoning itself is shown."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None


class TextOptions(msgspec.Struct, frozen=True):
    """`format`: what form the text has."""

    format: Annotated[dict[str, Any] | None, Meta(extra_json_schema={parts.KEY: parts.RESPONSE_FORMAT})] = None
    verbosity: str | None = None


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/responses."""

    model: str | None = None
    input: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[dict[str, Any]], Meta(min_length=1, extra_json_schema={parts.KEY: parts.ITEMS})]
        | None
    ) = None
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]], Meta(extra_json_schema={parts.KEY: parts.RESPONSE_TOOLS})] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, Meta(extra_json_schema={parts.KEY: parts.RESPONSE_TOOL_CHOICE})] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    seed: Seed | None = None
    stream: bool | None = None
    prompt_cache_key: Session | None = None
    session_id: Session | None = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None

    def without_effect(self) -> Iterator[str]:
        """Parts of fields that are asked for, known, and change nothing."""
        for name in ("summary", "generate_summary", "context"):
            if getattr(self.reasoning, name, None) is not None:
                yield f"reasoning.{name}"
        if self.text is not None and self.text.verbosity is not None:
            yield "text.verbosity"
        yield from (f"include:{name[:40]}" for name in self.include or () if name != LOGPROBS)


RESPONSE = Table(ResponseBody, ("model", "input"), NOT_HERE, HARMLESS)


class Responses:
    """The dialect of /v1/responses."""

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Ask:
        body, unknown, ignored = RESPONSE.read(raw)
        tools, skipped = function_tools(body.tools or [])
        response_format = response_format_of(body.text)
        wants_logprobs = LOGPROBS in (body.include or []) or bool(body.top_logprobs)
        return Ask(
            kind="response",
            field="input",
            model=body.model,
            conversation=Conversation(
                messages=messages_of(body),
                tools=tools,
                tool_choice=tool_choice_of(body.tool_choice),
                parallel=body.parallel_tool_calls is not False,
                response_format=response_format,
                reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
            ),
            max_tokens=body.max_output_tokens,
            sampling=SamplingParams(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                presence_penalty=body.presence_penalty or 0.0,
                frequency_penalty=body.frequency_penalty or 0.0,
                constraint=constraint_of_format(response_format, "text.format"),
            ),
            seed=body.seed,
            logprobs=(body.top_logprobs or 0) if wants_logprobs else -1,
            stream=bool(body.stream),
            session=session_of(body.session_id, headers, body.prompt_cache_key),
            cache_salt=body.cache_salt or "",
            unknown=unknown,
            ignored=(*ignored, *skipped, *body.without_effect()),
            extra=body,
        )

    def reply(self, call: Call) -> ResponseReply:
        return ResponseReply(call)


def function_tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Function tools in the chat-completions shape, and the names of the others."""
    own, skipped = sort_out(tools, [tool.get("type") for tool in tools], "function")
    functions = []
    for _, tool in own:
        fields = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
        functions.append({"type": "function", "function": fields})
    return functions, skipped


def tool_choice_of(choice: str | dict[str, Any] | None) -> str:
    """The choice as `Conversation` has it. Raises RequestError naming the field."""
    if choice is None:
        return "auto"
    if choice in ("auto", "none", "required"):
        return str(choice)
    if isinstance(choice, dict):
        if choice.get("type") == "function" and isinstance(choice.get("name"), str):
            return f"function:{choice['name']}"
        if choice.get("type") == "allowed_tools" and choice.get("mode") in ("auto", "required"):
            return str(choice["mode"])
    raise RequestError(
        'tool_choice must be "auto", "none", "required" or {"type": "function", "name": ...}', param="tool_choice"
    )


def response_format_of(text: TextOptions | None) -> dict[str, Any] | None:
    """The format in the chat-completions shape."""
    if text is None or text.format is None or text.format.get("type") == "text":
        return None
    if text.format.get("type") == "json_schema":
        described = {name: text.format.get(name) for name in ("name", "schema", "strict", "description")}
        return {"type": "json_schema", "json_schema": described}
    return text.format


def messages_of(body: ResponseBody) -> list[Message]:
    """The conversation in the chat-completions shape. Raises RequestError naming the item."""
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input or ()):
        _add(messages, f"input[{number}]", item)
    if not messages:
        raise RequestError("input must hold at least one item that the model can read", param="input", code="empty_prompt")
    return messages


def _add(messages: list[Message], where: str, item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise RequestError(f"{where}.type must be a string", param=f"{where}.type")
    if kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise RequestError(f"{where}.role must be system, developer, user or assistant", param=f"{where}.role")
        content = _content(f"{where}.content", item.get("content"))
        last = messages[-1] if messages else {}
        if role == "assistant" and last.get("role") == "assistant" and not last.get("content"):
            last["content"] = content  # what stands after its reasoning
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        text = _reasoning(item)
        if text:
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif kind == "function_call":
        call = _call(where, item)
        if not messages or messages[-1].get("role") != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise RequestError(f"{where}.call_id must name a call", param=f"{where}.call_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(f"{where}.output", item.get("output"))})
    elif kind in ("item_reference", "compaction"):
        raise RequestError(f"{where}: {kind} needs stored responses, which this server does not keep", param=where)
    # Items of other kinds are traces of tools that were not offered to the model: it has not seen them either.


def _call(where: str, item: dict[str, Any]) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _content(where: str, content: Any) -> str:
    """The text of a message or result. Raises RequestError for anything that is no text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", param=where)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text" if kind != "refusal" else "refusal") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(text, str):
            raise RequestError(
                f"{where}[{number}]: only text can be read by this model, got a part of type {str(kind)[:40]!r}",
                param=f"{where}[{number}]",
                code="unsupported_content",
            )
        texts.append(text)
    return "".join(texts)


def _reasoning(item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
