"""Calls in the markup of DeepSeek-V4.1 as a grammar (Lark form), for answers that have to call or may only call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rackserve.text.dsml import CALLS, CALLS_END, INVOKE, INVOKE_END, PARAMETER, PARAMETER_END

_DEFINITIONS = ("$defs", "definitions")


def call_rules(functions: Sequence[dict[str, Any]], most: int) -> list[str]:
    """Rules of which `calls` is a block of 1 to `most` calls of `functions`, with arguments by their schemas.

    Parameters stand in the order of the schema, those that it does not require may be missing, and there are no others. A
    string is written as it is, up to the tag that ends it, so only its `enum` and `const` bind; all else is JSON by its schema.
    """
    rules = _Rules()
    names = [rules.add(_call(function, rules)) for function in functions]
    rules.lines[:0] = [
        f"calls: {_quoted(chr(10) * 2)}? {_quoted(CALLS)} call{{1,{most}}} {_quoted(chr(10) + CALLS_END)}",
        f"call: {' | '.join(names)}",
        f"text[suffix={_quoted(PARAMETER_END)}]: /(?s:.*)/",
    ]
    return rules.lines


class _Rules:
    """Rules so far; each has a name of its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, body: str) -> str:
        """The name of a new rule."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _call(function: dict[str, Any], rules: _Rules) -> str:
    schema = function.get("parameters") or {}
    properties = schema.get("properties")
    known: dict[str, Any] = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) else set()
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    parts = [_quoted(f'\n{INVOKE} name="{function["name"]}">')]
    for key, value in known.items():
        if '"' in key or "\n" in key:  # no call can carry it
            continue
        name = rules.add(_parameter(key, value if isinstance(value, dict) else {}, shared))
        parts.append(name if key in needed else f"{name}?")
    empty = [] if needed else ['"\\n"?']  # a call without arguments is taught with an empty line
    return " ".join([*parts, *empty, _quoted(f"\n{INVOKE_END}")])


def _parameter(key: str, schema: dict[str, Any], shared: dict[str, Any]) -> str:
    head = f'\n{PARAMETER} name="{key}" string='
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list) and allowed and all(isinstance(value, str) for value in allowed):
        choices = " | ".join(_quoted(value) for value in allowed)
        return f"{_quoted(head + chr(34) + 'true' + chr(34) + '>')} ({choices}) {_quoted(PARAMETER_END)}"
    as_text = f"{_quoted(head + chr(34) + 'true' + chr(34) + '>')} text"
    if schema.get("type") == "string":
        return as_text
    json_value = f"%json {msgspec.json.encode({**shared, **schema}).decode()}"
    as_json = f"{_quoted(head + chr(34) + 'false' + chr(34) + '>')} {json_value} {_quoted(PARAMETER_END)}"
    return as_json if "type" in schema and schema["type"] != ["string"] else f"{as_text} | {as_json}"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
