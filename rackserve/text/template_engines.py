"""Chat templates as programs: one engine that counts a program's work, and one for programs that are trusted."""

from __future__ import annotations

import re
from threading import Lock
from typing import Any, NoReturn

import minijinja
import msgspec
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rackserve.base.errors import FileFormatError, RequestError

FUEL = 1_000_000
"""Steps of one rendering, beyond one for each character that it is given: some 30 ms."""

MAX_GROWTH = 1 << 20
"""Characters that a prompt may have beyond four times what the rendering is given."""

_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_FORMAT = re.compile(r"\.\s*format\s*\(")


class BoundedTemplate:
    """A template whose steps and text are bounded, and which has no way to the objects of Python beyond what it is given.

    Not counted, and so still able to waste time, is writing out values that hold each other over and over.
    Raises FileFormatError for what the engine cannot read or bound.
    """

    __slots__ = ("_environment", "_lock")

    def __init__(self, source: str, origin: str) -> None:
        if _FORMAT.search(source):
            raise FileFormatError(f"{origin}: the chat template calls str.format, whose output has no bound")
        self._lock = Lock()
        self._environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True)
        self._environment.add_filter("tojson", _to_json)
        self._environment.add_global("raise_exception", _refuse)
        # A mark of training tools around answers: it changes nothing here, and the engine does not know it.
        source = _GENERATION.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)
        try:
            self._environment.add_template("chat", source)
        except minijinja.TemplateError as error:
            raise FileFormatError(f"{origin}: the chat template does not parse ({_first_line(error)})") from error

    def render(self, size: int, values: dict[str, Any]) -> str:
        """The text for `values`, which hold about `size` characters. Raises RequestError."""
        try:
            with self._lock:
                self._environment.fuel = FUEL + size
                text = self._environment.render_template("chat", **values)
        except (minijinja.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise _objection(_first_line(error)) from error
        if len(text) > 4 * size + MAX_GROWTH:
            raise _objection(f"its text has {len(text)} characters, far more than it was given")
        return text


class SandboxedTemplate:
    """A template in Jinja's sandbox: kept from Python's objects, but bounded neither in time nor in memory."""

    __slots__ = ("_template",)

    def __init__(self, source: str, origin: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise FileFormatError(f"{origin}: the chat template does not parse ({error})") from error

    def render(self, size: int, values: dict[str, Any]) -> str:
        """The text for `values`. Raises RequestError."""
        try:
            return self._template.render(values)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise _objection(str(error)) from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as model templates expect it: not escaped for HTML, characters as they are."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent or 0).decode()


def _refuse(message: str) -> NoReturn:
    raise _objection(message)


def _objection(reason: str) -> RequestError:
    return RequestError(f"the chat template refuses these messages: {reason}", param="messages")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
