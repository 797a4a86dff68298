"""/v1/messages: what the body asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rackserve.api.ask import Ask, Conversation
from rackserve.api.call import Call
from rackserve.api.dialects import parts
from rackserve.api.dialects.body import Table
from rackserve.api.dialects.formats import constraint_of_format
from rackserve.api.dialects.message_reply import MessageReply
from rackserve.api.dialects.openai import Count, Seed, Session, Stop, session_of
from rackserve.api.dialects.tools import sort_out
from rackserve.base.errors import RequestError
from rackserve.base.request import SamplingParams
from rackserve.text.chat import Message

MAX_STOP_SEQUENCES = 8

NOT_HERE: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
HARMLESS = frozenset({"context_management", "inference_geo", "service_tier", "betas", "speed", "cache_control"})


class Thinking(msgspec.Struct, frozen=True):
    """`type` "enabled" or "adaptive": reason first. The budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """`effort`: how hard to reason; `format`: {"type": "json_schema", "schema": ...}."""

    effort: str | None = None
    format: Annotated[dict[str, Any] | None, Meta(extra_json_schema={parts.KEY: parts.MESSAGE_FORMAT})] = None


class MessageMetadata(msgspec.Struct, frozen=True):
    """`user_id`: taken for the session, as nothing else names it."""

    user_id: str | None = None


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/messages; `max_tokens` may be missing only where tokens are just counted."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, extra_json_schema={parts.KEY: parts.MESSAGES})] | None = None
    max_tokens: Count | None = None
    system: Annotated[str | list[dict[str, Any]] | None, Meta(extra_json_schema={parts.KEY: parts.SYSTEM})] = None
    tools: Annotated[list[dict[str, Any]], Meta(extra_json_schema={parts.KEY: parts.MESSAGE_TOOLS})] | None = None
    tool_choice: Annotated[dict[str, Any] | None, Meta(extra_json_schema={parts.KEY: parts.MESSAGE_TOOL_CHOICE})] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOP_SEQUENCES)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: MessageMetadata | None = None
    seed: Seed | None = None
    session_id: Session | None = None
    cache_salt: str | None = None

    def without_effect(self) -> Iterator[str]:
        """Parts of fields that are asked for, known, and change nothing."""
        for name in ("budget_tokens", "display"):
            if getattr(self.thinking, name, None) is not None:
                yield f"thinking.{name}"


class CountBody(MessageBody, frozen=True, kw_only=True):
    """Body of /v1/messages/count_tokens: what /v1/messages would be sent, as far as it makes the prompt."""


MESSAGE = Table(MessageBody, ("model", "max_tokens", "messages"), NOT_HERE, HARMLESS)
COUNT = Table[MessageBody](CountBody, ("model", "messages"), NOT_HERE, HARMLESS)


class Messages:
    """The dialect of /v1/messages. `counting`: that of count_tokens, which generates nothing."""

    def __init__(self, *, counting: bool = False) -> None:
        self._counting = counting

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Ask:
        body, unknown, ignored = (COUNT if self._counting else MESSAGE).read(raw)
        tools, skipped = _tools(body.tools or [])
        response_format = _response_format(body.output_config)
        return Ask(
            kind="message",
            field="messages",
            model=body.model,
            conversation=Conversation(
                messages=messages_of(body),
                tools=tools,
                tool_choice=_tool_choice(body.tool_choice),
                parallel=not (body.tool_choice or {}).get("disable_parallel_tool_use"),
                response_format=response_format,
                reasoning_effort=body.output_config.effort if body.output_config else None,
                thinking=None if body.thinking is None else body.thinking.type != "disabled",
                continue_last=(body.messages or [{}])[-1].get("role") == "assistant",
            ),
            max_tokens=body.max_tokens,
            stops=tuple(body.stop_sequences or ()),
            sampling=SamplingParams(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=body.top_k or 0,
                constraint=constraint_of_format(response_format, "output_config.format"),
            ),
            seed=body.seed,
            stream=bool(body.stream),
            session=session_of(body.session_id, headers, body.metadata.user_id if body.metadata else None),
            cache_salt=body.cache_salt or "",
            unknown=unknown,
            ignored=(*ignored, *skipped, *body.without_effect()),
        )

    def reply(self, call: Call) -> MessageReply:
        return MessageReply(call)


def _tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Client tools in the chat-completions shape, and the names of those that a server would have to carry out."""
    own, skipped = sort_out(tools, ["custom" if tool.get("type") is None else tool["type"] for tool in tools], "custom")
    functions = []
    for number, tool in own:
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise RequestError(f"tools[{number}] needs a name and an input_schema", param=f"tools[{number}]")
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        functions.append({"type": "function", "function": function})
    return functions, skipped


def _tool_choice(choice: dict[str, Any] | None) -> str:
    if choice is None:
        return "auto"
    for kind, meaning in (("auto", "auto"), ("none", "none"), ("any", "required")):
        if choice.get("type") == kind:
            return meaning
    if choice.get("type") == "tool" and isinstance(choice.get("name"), str):
        return f"function:{choice['name']}"
    raise RequestError('tool_choice.type must be "auto", "any", "none", or "tool" with a name', param="tool_choice")


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    if config.format.get("type") != "json_schema":
        raise RequestError('output_config.format.type must be "json_schema"', param="output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": config.format.get("schema")}}


def messages_of(body: MessageBody) -> list[Message]:
    """The conversation in the chat-completions shape. Raises RequestError naming the message."""
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": _text("system", body.system)})
    for number, message in enumerate(body.messages or []):
        where, role = f"messages[{number}]", message.get("role")
        content = message.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list):
            messages += _of_assistant(where, content) if role == "assistant" else _of_user(where, role, content)
        else:
            raise RequestError(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
    return messages


def _of_assistant(where: str, blocks: list[Any]) -> list[Message]:
    message: Message = {"role": "assistant", "content": ""}
    for number, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                message["content"] += text
            case {"type": "thinking", "thinking": str(text)}:
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case {"type": "redacted_thinking" | "server_tool_use" | "web_search_tool_result"}:
                pass
            case {"type": "tool_use", "id": str(name), "name": str(called), "input": dict(arguments)}:
                function = {"name": called, "arguments": msgspec.json.encode(arguments).decode()}
                message.setdefault("tool_calls", []).append({"id": name, "type": "function", "function": function})
            case _:
                raise _unreadable(f"{where}.content[{number}]", block)
    return [message]


def _of_user(where: str, role: str, blocks: list[Any]) -> list[Message]:
    """Tool results come first, as they answer the calls before; the texts between them are one message behind."""
    results: list[Message] = []
    texts = []
    for number, block in enumerate(blocks):
        at = f"{where}.content[{number}]"
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_result", "tool_use_id": str(name)}:
                results.append(
                    {
                        "role": "tool",
                        "tool_call_id": name,
                        "content": _text(at, "" if block.get("content") is None else block["content"]),
                    }
                )
            case _:
                raise _unreadable(at, block)
    return [*results, {"role": role, "content": "\n\n".join(texts)}] if texts or not results else results


def _text(where: str, content: Any) -> str:
    """The text of a system prompt or a tool result."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of blocks", param=where)
    texts = []
    for number, block in enumerate(content):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _unreadable(f"{where}[{number}]", block)
    return "\n\n".join(texts)


def _unreadable(where: str, block: Any) -> RequestError:
    kind = block.get("type") if isinstance(block, dict) else block
    text = f"{where}: only text, thinking, tool_use and tool_result blocks can be read by this model, got {str(kind)[:40]!r}"
    return RequestError(text, param=where, code="unsupported_content")
