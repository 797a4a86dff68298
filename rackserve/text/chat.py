"""Chat messages to prompt text, by the model's own template, which is a stranger's program and run as one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rackserve.base.errors import FileFormatError, RequestError
from rackserve.text.hermes import write_tools
from rackserve.text.messages import Message as Message
from rackserve.text.messages import read_calls, read_tools, show
from rackserve.text.quoting import Piece, Quoting, unused_sign
from rackserve.text.template_engines import BoundedTemplate, SandboxedTemplate
from rackserve.text.tokenizer import read_json, special_token

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """The template of one model. Rendering has no side effects and may run on any thread.

    A template is part of the model's files and not trusted: it is rendered within bounds of work and text. One that cannot be
    is refused, unless `trusted`: then it is rendered without bounds.

    takes_tools  the template describes tools itself; if not, they are written as in `hermes`
    """

    __slots__ = ("_bos", "_eos", "_source", "_template", "takes_tools")

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", origin: str = "chat template", trusted: bool = False
    ) -> None:
        self._bos = bos_token
        self._eos = eos_token
        self._source = source
        self.takes_tools = self.takes("tools")
        self._template: BoundedTemplate | SandboxedTemplate
        try:
            self._template = BoundedTemplate(source, origin)
        except FileFormatError:
            if not trusted:
                raise
            self._template = SandboxedTemplate(source, origin)

    @classmethod
    def from_folder(cls, folder: Path, *, trusted: bool = False) -> ChatTemplate | None:
        """The template of a model folder, or None when the model has none. Raises FileFormatError naming the file."""
        path = folder / "tokenizer_config.json"
        config = read_json(path) if path.exists() else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        if (folder / "chat_template.jinja").exists():
            path = folder / "chat_template.jinja"
            source = path.read_text(encoding="utf-8")
        if source is None:
            return None
        if not isinstance(source, str):
            raise FileFormatError(f"{path}: chat_template must be a string or a list with one named 'default'")
        bos_token, eos_token = special_token(config, "bos_token"), special_token(config, "eos_token")
        return cls(source, bos_token=bos_token, eos_token=eos_token, origin=str(path), trusted=trusted)

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, options: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt for the next answer, with `tools` (chat-completions shape) offered in it. options: see `pieces`.

        Raises RequestError naming the field at fault, or `messages` when the template objects.
        """
        return "".join(piece.text for piece in self.pieces(Quoting({}), messages, tools, options))

    def pieces(
        self,
        quoting: Quoting,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Piece, ...]:
        """The prompt in pieces: tokens that clients spelt are apart from the rest. One piece if they spelt none.

        options: names and values that the template is given besides, of those that it `takes`. Raises RequestError as `render`.
        """
        if not messages:
            raise RequestError("messages must hold at least one message", param="messages")
        functions = read_tools("tools", tools)
        checked = [_check(number, message) for number, message in enumerate(messages)]
        if self.takes_tools:
            for message in checked:
                for call in message.get("tool_calls", ()):  # templates expect them as objects
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        sign = ""
        if quoting.spelt([checked, functions]):
            sign = unused_sign([checked, functions, self._source])
            functions = quoting.mark(functions, sign)
            checked = [
                {**quoting.mark(message, sign, answer=message["role"] == "assistant"), "role": message["role"]}
                for message in checked
            ]
        if not self.takes_tools:
            checked = write_tools(checked, functions)
        values = {
            **(options or {}),
            "messages": checked,
            "tools": [{"type": "function", "function": function} for function in functions] or None,
            "add_generation_prompt": True,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
        size = sum(len(message["content"]) for message in checked)
        size += len(json.dumps([message.get("tool_calls") for message in checked])) + len(json.dumps(functions))
        text = self._template.render(size, values)
        return quoting.pieces(text, sign) if sign else (Piece(text, True),)

    def takes(self, option: str) -> bool:
        """Whether the template knows an option of this name."""
        return re.search(rf"\b{re.escape(option)}\b", self._source) is not None


def _check(number: int, message: Message) -> Message:
    """The message with its content as one string, and its calls with their arguments as JSON text."""
    where = f"messages[{number}]"
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {show(role)}", param=f"{where}.role")
    calls = message.get("tool_calls") or None
    if message.get("function_call") or (calls and role != "assistant"):
        raise RequestError(f"{where}.tool_calls: only an assistant's tool_calls are supported", param=f"{where}.tool_calls")
    content = message.get("content")
    checked = {key: value for key, value in message.items() if key != "tool_calls"}
    checked["content"] = "" if content is None and calls else _text(f"{where}.content", content)
    if calls:
        checked["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": written}}
            for call, written in read_calls(f"{where}.tool_calls", calls)
        ]
    return checked


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts, got {show(content)}", param=where)
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(
                f"{where}[{number}]: only parts {{'type': 'text', 'text': ...}} are supported, got {show(kind)}", param=where
            )
    return "".join(part["text"] for part in content)
