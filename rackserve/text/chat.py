"""Chat messages to prompt text, by the model's own template in a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rackserve.base.errors import FileFormatError, RequestError
from rackserve.text.tokenizer import read_json, special_token

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]
"""One chat message as the client sent it: `role`, `content` (a string or a list of text parts) and template extras."""


class ChatTemplate:
    """The template of one model. Rendering has no side effects and may run on any thread."""

    __slots__ = ("_bos", "_eos", "_template")

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", origin: str = "chat template") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise FileFormatError(f"{origin}: the chat template does not parse ({error})") from error
        self._bos = bos_token
        self._eos = eos_token

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
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
        return cls(source, bos_token=bos_token, eos_token=eos_token, origin=str(path))

    def render(self, messages: list[Message]) -> str:
        """The prompt for the next answer. Raises RequestError (param `messages`) when the messages or the template object."""
        if not messages:
            raise RequestError("messages must hold at least one message", param="messages")
        checked = [_check(number, message) for number, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=checked, add_generation_prompt=True, bos_token=self._bos, eos_token=self._eos, tools=None
            )
        except RequestError:
            raise
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error


def _check(number: int, message: Message) -> Message:
    """The message with its content as one string."""
    where = f"messages[{number}]"
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {_show(role)}", param=f"{where}.role")
    if message.get("tool_calls") or message.get("function_call"):
        raise RequestError(f"{where}.tool_calls: tool calls are not supported", param=f"{where}.tool_calls")
    return {**message, "content": _text(f"{where}.content", message.get("content"))}


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts, got {_show(content)}", param=where)
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(
                f"{where}[{number}]: only parts {{'type': 'text', 'text': ...}} are supported, got {_show(kind)}", param=where
            )
    return "".join(part["text"] for part in content)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as model templates expect it: not escaped for HTML, characters as they are."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent or 0).decode()


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"the chat template refuses these messages: {message}", param="messages")
