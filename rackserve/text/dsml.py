"""Prompts of DeepSeek-V4.1: the release has no template file, its turns and tool calls follow a markup called DSML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from rackserve.base.errors import RequestError
from rackserve.text.deepseek_tokenizer import BOS, EOS
from rackserve.text.messages import Message, ToolCall, Turn, read_tools, read_turns, refuse, show
from rackserve.text.tokenizer import Piece

SYSTEM, USER, ASSISTANT, REMINDER = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, THINK_END = "<think>", "</think>"
MARK = "｜DSML｜"
CALLS, CALLS_END = f"<{MARK} calls>", f"</{MARK} calls>"
INVOKE, INVOKE_END = f"<{MARK} invoke", f"</{MARK} invoke>"
PARAMETER, PARAMETER_END = f"<{MARK} parameter", f"</{MARK} parameter>"

EFFORTS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
"""Reasoning effort by name; any integer from 1 to 100 may be given instead, "none" means no reasoning."""

DEFAULT_EFFORT = "high"

_TOOLS_BEFORE, _TOOLS_AFTER = (Path(__file__).parent / "data" / "dsml_tools.txt").read_bytes().decode().split("{SCHEMAS}")


class ChatOptions(msgspec.Struct, frozen=True):
    """What a request asks of the prompt beside its messages.

    tools             tools in the chat-completions shape, offered on the first system message
    response_format   in the chat-completions shape: text, json_object or json_schema
    reasoning_effort  a name of EFFORTS, 1 to 100, or "none"; None means the default
    thinking_mode     "thinking" or "chat"
    drop_thinking     leave out the reasoning of turns before the last user turn; never done once tools are offered
    """

    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | int | None = None
    thinking_mode: str = "thinking"
    drop_thinking: bool = True

    def effort(self) -> int | None:
        """How hard to reason, 1 to 100; None in chat mode. Raises RequestError naming the field at fault."""
        if self.thinking_mode not in ("thinking", "chat"):
            refuse("thinking_mode", f"must be thinking or chat, got {show(self.thinking_mode)}")
        asked = DEFAULT_EFFORT if self.reasoning_effort is None else self.reasoning_effort
        if asked == "none":
            return None
        number = EFFORTS.get(asked) if isinstance(asked, str) else asked
        if number is None or isinstance(number, bool) or not 1 <= number <= 100:
            names = ", ".join(EFFORTS)
            refuse("reasoning_effort", f"must be none, {names} or an integer from 1 to 100, got {show(asked)}")
        return number if self.thinking_mode == "thinking" else None


class DsmlTemplate:
    """Renders conversations for DeepSeek-V4.1. No state, no side effects: may run on any thread."""

    __slots__ = ()

    def render(self, messages: list[Message], options: ChatOptions | None = None) -> str:
        """The prompt as text. Raises RequestError naming the field at fault."""
        return "".join(piece.text for piece in self.pieces(messages, options))

    def pieces(self, messages: list[Message], options: ChatOptions | None = None) -> tuple[Piece, ...]:
        """The prompt in pieces that tell the markup from what the client wrote, for `Vocabulary.encode_pieces`.

        Raises RequestError naming the field at fault.
        """
        options = options or ChatOptions()
        effort = options.effort()
        turns = read_turns(messages)
        _offer(turns, options)
        writer = _Writer(turns, effort, options.drop_thinking and not any(turn.tools for turn in turns))
        for index in range(len(turns)):
            writer.write(index)
        return writer.finish()


def starts_reasoning(pieces: tuple[Piece, ...]) -> bool:
    """Whether the answer to this prompt begins inside its reasoning."""
    last = pieces[-1]
    return last.ours and last.text.endswith((THINK, THINK + task_token("action")))


def task_token(task: str) -> str:
    """The special token of a task."""
    return f"<｜{task}｜>"


def _offer(turns: list[Turn], options: ChatOptions) -> None:
    """Put the request's tools and response format on the first system turn, made if missing."""
    tools = read_tools("tools", options.tools)
    schema = _schema(options.response_format)
    if not tools and schema is None:
        return
    system = next((turn for turn in turns if turn.role == "system"), None)
    if system is None:
        system = Turn("system", [])
        turns.insert(0, system)
    system.tools = system.tools + tools
    if schema is not None:
        system.response_format = schema


def _schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema that a request's response format stands for, None for free text."""
    if response_format is None or response_format.get("type") == "text":
        return None
    if response_format.get("type") == "json_object":
        return {"type": "object"}
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if response_format.get("type") != "json_schema" or not isinstance(schema, dict):
        refuse(
            "response_format", f"must be of type text, json_object or json_schema with a schema, got {show(response_format)}"
        )
    return schema


def to_json(where: str, value: Any) -> str:
    """`value` as the model was taught to read JSON. Raises RequestError naming `where` if it has none."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where}: cannot be written as JSON ({error})", param=where) from error


class _Writer:
    """Writes turns in order. `drop`: assistant turns before the last user turn lose their reasoning."""

    __slots__ = ("_drop", "_effort", "_last_user", "_markup", "_pieces", "_turns")

    def __init__(self, turns: list[Turn], effort: int | None, drop: bool) -> None:
        self._pieces: list[Piece] = []
        self._markup = [BOS]  # ours, since the last piece that is theirs
        self._turns = turns
        self._effort = effort
        self._drop = drop
        self._last_user = max((index for index in range(len(turns)) if self._asks(index)), default=-1)

    def write(self, index: int) -> None:
        """Turn `index`, and the header of the answer where one begins."""
        turn = self._turns[index]
        if index == 0 and (self._effort is not None or turn.role == "system"):
            self._ours(SYSTEM)
        if index == 0 and self._effort is not None:
            about = "(range 1-100, the higher the value, the more thorough the reasoning)"
            self._ours(f"Reasoning Effort: {self._effort} {about}\n\n")
        if turn.role == "assistant":
            self._answer(index, turn)
        else:
            opener = {"system": SYSTEM if index else "", "latest_reminder": REMINDER}.get(turn.role, USER)
            self._ours(opener)
            self._text(turn)
            self._extras(turn)
        following = self._turns[index + 1].role if index + 1 < len(self._turns) else None
        if following in (None, "assistant", "latest_reminder"):
            self._header(index, turn, last=following is None)

    def finish(self) -> tuple[Piece, ...]:
        """What was written; no two neighbours are both ours."""
        self._close()
        return tuple(self._pieces)

    def _ours(self, text: str) -> None:
        if text:
            self._markup.append(text)

    def _theirs(self, text: str) -> None:
        if text:
            self._close()
            self._pieces.append(Piece(text, False))

    def _close(self) -> None:
        if self._markup:
            self._pieces.append(Piece("".join(self._markup), True))
            self._markup.clear()

    def _asks(self, index: int) -> bool:
        """Whether an answer is due after this turn: a user turn, or a system turn in the middle of the conversation."""
        return self._turns[index].role in ("user", "developer") or (self._turns[index].role == "system" and index > 0)

    def _text(self, turn: Turn) -> None:
        for number, block in enumerate(turn.blocks):
            self._ours("\n\n" if number else "")
            self._ours("" if block.call_id is None else "<tool_result>")
            self._theirs(block.text)
            self._ours("" if block.call_id is None else "</tool_result>")

    def _extras(self, turn: Turn) -> None:
        if turn.tools:
            self._ours("\n\n" + _TOOLS_BEFORE)
            self._theirs("\n".join(to_json("tools", tool) for tool in turn.tools))
            self._ours(_TOOLS_AFTER)
        if turn.response_format:
            self._ours("\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n")
            self._theirs(to_json("response_format", turn.response_format))

    def _answer(self, index: int, turn: Turn) -> None:
        after_task = index > 0 and self._turns[index - 1].task is not None
        if self._effort is not None and not after_task and not (self._drop and index < self._last_user):
            self._theirs(turn.reasoning)
            self._ours(THINK_END)
        self._theirs(turn.text)
        if turn.calls:
            self._ours(f"\n\n{CALLS}\n")
            for call in turn.calls:
                self._call(call)
            self._ours(CALLS_END)
        self._ours(EOS)

    def _call(self, call: ToolCall) -> None:
        self._ours(f'{INVOKE} name="')
        self._theirs(call.name)
        self._ours('">\n')
        for number, (key, value) in enumerate(call.arguments.items()):
            self._ours(("\n" if number else "") + f'{PARAMETER} name="')
            self._theirs(key)
            self._ours('" string="true">' if isinstance(value, str) else '" string="false">')
            self._theirs(value if isinstance(value, str) else to_json("messages", value))
            self._ours(PARAMETER_END)
        self._ours(f"\n{INVOKE_END}\n")

    def _header(self, index: int, turn: Turn, *, last: bool) -> None:
        """What opens the answer to turn `index`."""
        thinks = self._effort is not None
        if turn.task == "action":
            self._ours(ASSISTANT)
            self._ours(THINK if thinks else THINK_END)
            self._ours(task_token(turn.task))
        elif turn.task is not None:
            self._ours(task_token(turn.task))
        elif self._asks(index) or (last and turn.role in ("system", "assistant")):
            self._ours(ASSISTANT)
            self._ours(THINK if thinks and not (self._drop and index < self._last_user) else THINK_END)
