"""Prompts of DeepSeek-V4.1: the release has no template file, its turns and tool calls follow a markup called DSML."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec

from rackserve.base.errors import RequestError
from rackserve.text.deepseek_tokenizer import BOS, EOS
from rackserve.text.messages import NONE_MADE, Message, ToolCall, Turn, made_after, read_tools, read_turns, refuse, show
from rackserve.text.prompt_text import PromptText, Stem, Written, utf8
from rackserve.text.quoting import Piece

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
        return self.write(messages, options).text.raw.decode()

    def pieces(self, messages: list[Message], options: ChatOptions | None = None) -> tuple[Piece, ...]:
        """The prompt in pieces that tell the markup from what the client wrote. Raises RequestError as `render`."""
        return self.write(messages, options).text.pieces()

    def write(self, messages: list[Message], options: ChatOptions | None = None, before: Written | None = None) -> Written:
        """The prompt, which is the same whatever was written `before`: what is shared with that is not rendered again.

        Raises RequestError as `render`.
        """
        options = options or ChatOptions()
        writer = _begin(messages, options, before)
        writer.write()
        return Written(writer.text(), writer.stem(messages, options))


def starts_reasoning(text: PromptText) -> bool:
    """Whether the answer to this prompt begins inside its reasoning."""
    return bool(text.marks[-1] & 1) and text.raw.endswith((THINK.encode(), (THINK + task_token("action")).encode()))


def task_token(task: str) -> str:
    """The special token of a task."""
    return f"<｜{task}｜>"


def _begin(messages: list[Message], options: ChatOptions, before: Written | None) -> _Writer:
    """A writer of what is not in `before`."""
    effort = options.effort()
    stem = None if before is None else before.stem
    if before is not None and stem is not None and _is_asked(stem.asked, options, messages[: stem.num_messages + 1]):
        turns = read_turns(messages, stem.num_messages, stem.made)
        drop = options.drop_thinking and not (stem.offers or any(turn.tools for turn in turns))
        if drop == stem.drop:
            return _Writer(turns, effort, drop, before.text, stem)
    turns = read_turns(messages)
    _offer(turns, options)
    return _Writer(turns, effort, options.drop_thinking and not any(turn.tools for turn in turns))


def _asked(options: ChatOptions | None, messages: list[Message]) -> bytes:
    """Bytes that nothing written otherwise has; equal values may (1, 1.0 and true; keys in another order). Empty: unknown."""
    try:
        return b"".join(map(_encoder.encode, messages if options is None else [options, *messages]))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return b""


def _is_asked(asked: bytes, options: ChatOptions, messages: list[Message]) -> bool:
    """Whether `asked` is what `_asked` gives for these."""
    written, done = bytearray(), 0
    try:
        for value in (options, *messages):
            _encoder.encode_into(value, written)
            if not asked.startswith(written, done):
                return False
            done += len(written)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return False
    return done == len(asked)


_encoder = msgspec.msgpack.Encoder()


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
    """Writes turns in order, behind the `stem` of the text `before`, if there is one.

    drop: answers before the last turn that asks for one lose their reasoning.
    """

    __slots__ = (
        "_before",
        "_drop",
        "_effort",
        "_end",
        "_first",
        "_last_user",
        "_marks",
        "_markup",
        "_parts",
        "_stem",
        "_turns",
        "_upto",
    )

    def __init__(
        self, turns: list[Turn], effort: int | None, drop: bool, before: PromptText | None = None, stem: Stem | None = None
    ) -> None:
        self._parts: list[bytes | memoryview] = []
        self._marks = array("q")
        self._end = 0
        self._markup = [BOS]  # ours, since the last piece that is theirs
        self._first = 0  # number of the first of the turns
        self._turns = turns
        self._effort = effort
        self._drop = drop
        self._stem = stem
        self._upto: tuple[int, str] = (0, "")  # finished pieces and markup before the last turn that asks
        if before is not None and stem is not None:
            self._first = stem.num_turns
            self._markup = [stem.markup]
            self._end = before.end(stem.num_pieces - 1)
            self._parts.append(memoryview(before.raw)[: self._end])
            self._marks = before.marks[: stem.num_pieces]
        asking = (index for index in reversed(range(self._first, self._first + len(turns))) if self._asks(index))
        self._last_user = next(asking, -1)

    def write(self) -> None:
        """All turns."""
        for index in range(self._first, self._first + len(self._turns)):
            if index == self._last_user:
                self._upto = len(self._marks), "".join(self._markup)
            self._write(index)
        self._close()

    def text(self) -> PromptText:
        """The whole prompt; no two neighbours of its pieces are both ours."""
        return PromptText(b"".join(self._parts), self._marks)

    def stem(self, messages: list[Message], options: ChatOptions) -> Stem | None:
        """What comes before the last turn that asks for an answer, as nothing behind it changes that.

        Unless something is offered on the first system message, which may be one that comes later.
        """
        offered = bool(options.tools) or _schema(options.response_format) is not None
        if self._last_user < 1 or (offered and messages[0].get("role") != "system"):
            return None
        old, settled = self._stem, self._turns[: self._last_user - self._first]
        num_messages = self._turn(self._last_user).number
        if old is None:
            asked = _asked(options, messages[: num_messages + 1])
        else:
            more = _asked(None, messages[old.num_messages + 1 : num_messages + 1])
            asked = old.asked + more if more or num_messages == old.num_messages else b""
        if not asked:
            return None
        return Stem(
            asked=asked,
            num_messages=num_messages,
            num_turns=self._last_user,
            num_pieces=self._upto[0],
            markup=self._upto[1],
            made=made_after(NONE_MADE if old is None else old.made, settled),
            offers=(old is not None and old.offers) or any(turn.tools for turn in settled),
            drop=self._drop,
        )

    def _turn(self, index: int) -> Turn:
        return self._turns[index - self._first]

    def _write(self, index: int) -> None:
        """Turn `index`, and the header of the answer where one begins."""
        turn = self._turn(index)
        if index == 0 and (self._effort is not None or turn.role == "system"):
            self._ours(SYSTEM)
        if index == 0 and self._effort is not None:
            about = "(range 1-100, the higher the value, the more thorough the reasoning)"
            self._ours(f"Reasoning Effort: {self._effort} {about}\n\n")
        if turn.role == "assistant":
            self._answer(index, turn)
        else:
            self._ours({"system": SYSTEM if index else "", "latest_reminder": REMINDER}.get(turn.role, USER))
            self._text(turn)
            self._extras(turn)
        following = self._turn(index + 1).role if index + 1 < self._first + len(self._turns) else None
        if following in (None, "assistant", "latest_reminder"):
            self._header(index, turn, last=following is None)

    def _ours(self, text: str) -> None:
        self._markup.append(text)

    def _theirs(self, text: str) -> None:
        if text:
            self._close()
            self._parts.append(utf8(text))
            self._end += len(self._parts[-1])
            self._marks.append(2 * self._end)

    def _close(self) -> None:
        markup = "".join(self._markup).encode()
        self._markup.clear()
        if markup:
            self._parts.append(markup)
            self._end += len(markup)
            self._marks.append(2 * self._end + 1)

    def _asks(self, index: int) -> bool:
        """Whether an answer is due after this turn: a user turn, or a system turn in the middle of the conversation."""
        role = self._turn(index).role
        return role in ("user", "developer") or (role == "system" and index > 0)

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
        after_task = index > self._first and self._turn(index - 1).task is not None
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
