"""Chat messages as a client sends them, checked and gathered into the turns a DeepSeek-V4.1 prompt is made of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from rackserve.base.errors import RequestError
from rackserve.text.prompt_text import Made

Message = dict[str, Any]
"""One chat message as the client sent it: `role`, `content` (a string or a list of text parts) and template extras."""

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
TASKS = ("action", "query", "authority", "domain", "title", "read_url")


class Block(msgspec.Struct, frozen=True):
    """One paragraph of a turn. `call_id` names the call whose result it is; None for text."""

    text: str
    call_id: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A call the assistant made; `id` is empty when the client gave none."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class Turn:
    """One turn of the conversation. There is no tool role: tool results are blocks of the user turn they belong to.

    tools            function objects offered from here on (system and developer turns)
    response_format  a JSON schema the answer must follow (system and developer turns), or None
    task             a short instruction known to the model by name (user turns), or None
    number           of its first message
    """

    role: str
    blocks: list[Block]
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    tools: list[dict[str, Any]] = field(default_factory=list)
    response_format: dict[str, Any] | None = None
    task: str | None = None
    number: int = 0

    @property
    def text(self) -> str:
        """The text blocks, joined as the model expects."""
        return "\n\n".join(block.text for block in self.blocks)


NONE_MADE = Made({}, frozenset())


def read_turns(messages: list[Message], start: int = 0, made: Made = NONE_MADE) -> list[Turn]:
    """The turns of a conversation, from message `start` on, where a turn begins and calls were `made` before.

    Neighbouring user and tool messages become one user turn, unless the earlier carries a task, whose answer must follow;
    tool results stand in the order of the calls. Raises RequestError naming the message and field at fault.
    """
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages")
    turns: list[Turn] = []
    places, known = made.places, set(made.ids)
    for number in range(start, len(messages)):
        turn = _read(f"messages[{number}]", messages[number], known)
        last = turns[-1] if turns else None
        if last is not None and last.role == turn.role == "user" and last.task is None:
            last.blocks += turn.blocks
            last.task = turn.task
            continue
        if last is not None:
            last.blocks = _in_call_order(last.blocks, places)
        turn.number = number
        turns.append(turn)
        if turn.calls:
            places = _places(turn)
            known |= places.keys()
    turns[-1].blocks = _in_call_order(turns[-1].blocks, places)
    return turns


def made_after(made: Made, turns: list[Turn]) -> Made:
    """The calls made after more `turns`."""
    places = [_places(turn) for turn in turns if turn.calls]
    return Made(places[-1], made.ids.union(*places)) if places else made


def _places(turn: Turn) -> dict[str, int]:
    """The place of each call of a turn, by its id."""
    return {call.id: place for place, call in enumerate(turn.calls) if call.id}


def _in_call_order(blocks: list[Block], places: dict[str, int]) -> list[Block]:
    """The blocks with tool results, among the places they take, in the order of their calls."""
    results = [block for block in blocks if block.call_id is not None]
    if len(results) < 2:
        return blocks
    results.sort(key=lambda block: places.get(block.call_id or "", 0))
    ordered = iter(results)
    return [block if block.call_id is None else next(ordered) for block in blocks]


def _read(where: str, message: Message, known: set[str]) -> Turn:
    role = message.get("role")
    if role not in ROLES:
        refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {show(role)}")
    if message.get("task") is not None and role != "user":
        refuse(f"{where}.task", "is for user messages only")
    if role == "tool":
        return Turn("user", [_result(where, message, known)])
    content = message.get("content")
    texts = [] if content is None and role == "assistant" else read_texts(f"{where}.content", content)
    turn = Turn(role, [Block(text) for text in texts])
    if role == "user":
        turn.task = _task(f"{where}.task", message.get("task"))
    elif role == "assistant":
        given = "reasoning_content" if message.get("reasoning_content") is not None else "reasoning"
        turn.reasoning = _optional_text(f"{where}.{given}", message.get(given))
        turn.calls = _calls(f"{where}.tool_calls", message.get("tool_calls"))
    elif role in ("system", "developer"):
        turn.tools = read_tools(f"{where}.tools", message.get("tools"))
        turn.response_format = message.get("response_format")
        if not isinstance(turn.response_format, dict | None):
            refuse(f"{where}.response_format", f"must be a JSON schema, got {show(turn.response_format)}")
    return turn


def _result(where: str, message: Message, known: set[str]) -> Block:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or not call_id:
        refuse(f"{where}.tool_call_id", f"must name the call that this is the result of, got {show(call_id)}")
    if call_id not in known:
        refuse(f"{where}.tool_call_id", f"{show(call_id)} is not the id of a tool call in an earlier assistant message")
    return Block("\n\n".join(read_texts(f"{where}.content", message.get("content"))), call_id)


def _task(where: str, task: Any) -> str | None:
    if task is not None and task not in TASKS:
        refuse(where, f"must be one of {', '.join(TASKS)}, got {show(task)}")
    return task  # type: ignore[no-any-return]  # one of TASKS


def read_texts(where: str, content: Any) -> list[str]:
    """The texts of a message's content: a string or a list of text parts. Raises RequestError naming `where`."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        refuse(where, f"must be a string or a list of text parts, got {show(content)}")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            refuse(where, f"part {number}: only parts {{'type': 'text', 'text': ...}} are supported, got {show(kind)}")
    return [part["text"] for part in content]


def read_tools(where: str, tools: Any) -> list[dict[str, Any]]:
    """The function objects of a list of tools, which may be missing. Raises RequestError naming `where`."""
    if not isinstance(tools, list | None):
        refuse(where, f"must be a list, got {show(tools)}")
    functions = []
    for number, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            refuse(where, f"tool {number} must be {{'type': 'function', 'function': {{...}}}}, got {show(tool)}")
        _name(f"{where}[{number}].function.name", function.get("name"))
        _optional_text(f"{where}[{number}].function.description", function.get("description"))
        if not isinstance(function.get("parameters"), dict | None):
            refuse(f"{where}[{number}].function.parameters", f"must be a JSON schema, got {show(function['parameters'])}")
        functions.append(function)
    return functions


def read_calls(where: str, calls: Any) -> list[tuple[ToolCall, str]]:
    """The calls of an answer, and the arguments of each as JSON text, as the client wrote it if it did.

    Raises RequestError naming `where` and the call.
    """
    read = []
    for call, given in zip(_calls(where, calls), calls, strict=True):
        text = given["function"].get("arguments")
        is_text = isinstance(text, str) and bool(text.strip())
        read.append((call, text.strip() if is_text else json.dumps(call.arguments, ensure_ascii=False)))
    return read


def _calls(where: str, calls: Any) -> tuple[ToolCall, ...]:
    if not isinstance(calls, list | None):
        refuse(where, f"must be a list, got {show(calls)}")
    return tuple(_call(f"{where}[{number}]", call) for number, call in enumerate(calls or []))


def _call(where: str, call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        refuse(where, f"must be {{'id': ..., 'type': 'function', 'function': {{...}}}}, got {show(call)}")
    call_id = _optional_text(f"{where}.id", call.get("id"))
    name = _name(f"{where}.function.name", function.get("name"))
    return ToolCall(call_id, name, _arguments(f"{where}.function.arguments", function.get("arguments")))


def _arguments(where: str, arguments: Any) -> dict[str, Any]:
    """The arguments of a call: a JSON object, as text or as itself; empty text means none."""
    if isinstance(arguments, str):
        try:
            arguments = read_json_text(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RequestError(f"{where}: must be a JSON object, got {show(arguments)} ({error})", param=where) from error
    if not isinstance(arguments, dict):
        refuse(where, f"must be a JSON object, got {show(arguments)}")
    for key in arguments:
        if '"' in key or "\n" in key:
            refuse(where, f"the argument name {show(key)} has a quotation mark or line break, which a call cannot carry")
    return arguments


def _name(where: str, name: Any) -> str:
    if not isinstance(name, str) or not name or '"' in name or "\n" in name:
        refuse(where, f"must be a name without quotation marks and line breaks, got {show(name)}")
    return name


def _optional_text(where: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        refuse(where, f"must be a string, got {show(value)}")
    return value or ""


def read_json_text(text: str) -> Any:
    """The value that `text` writes in JSON; ValueError for anything else, such as NaN or nesting too deep to read."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def refuse(where: str, text: str) -> NoReturn:
    """Raise RequestError for the field `where`."""
    raise RequestError(f"{where}: {text}", param=where)


def show(value: Any) -> str:
    """`value` for an error text, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
