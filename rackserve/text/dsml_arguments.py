"""The arguments of a tool call, from the parameters of its markup to JSON text, while they come in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rackserve.text.messages import read_json_text

WRAPPERS = ("arguments", "input")
"""Names under which models are known to pass the whole object of arguments."""


def parameter_names(functions: Sequence[dict[str, Any]]) -> dict[str, frozenset[str]]:
    """Names of the parameters of each tool, by the tool's name; none where the schema lists none."""
    schemas = {function["name"]: function.get("parameters") for function in functions}
    listed = {name: schema.get("properties") if isinstance(schema, dict) else None for name, schema in schemas.items()}
    return {name: frozenset(properties) if isinstance(properties, dict) else frozenset() for name, properties in listed.items()}


class Arguments:
    """The arguments of one call as JSON text that grows: each method returns what it adds to it.

    A string can be passed on as it comes; any other value only when it is known to be JSON, at its end. A lone argument that
    may turn out to wrap the others (`names` is then not empty) waits for the end of the call.
    """

    __slots__ = ("_direct", "_key", "_names", "_seen", "_string", "_value", "_wrapper", "_wraps")

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._seen: set[str] = set()
        self._key: str | None = None  # of the parameter whose value is being read
        self._string: str | None = None  # its `string` attribute
        self._direct = False  # its value is passed on as it comes
        self._wraps = False  # it may wrap the others
        self._value: list[str] = []  # else it is kept here
        self._wrapper: str | None = None  # the JSON of a finished argument that may wrap the others

    def has(self, key: str) -> bool:
        """Whether there was a parameter of this name before."""
        return key in self._seen

    def open(self, key: str, string: str | None) -> str:
        """A parameter begins."""
        text = self._unwrapped(last=False)
        self._wraps = not self._seen and key in WRAPPERS and bool(self._names) and key not in self._names
        self._key = None if key in self._seen else key  # the first of a name counts
        self._string = string
        self._direct = string == "true" and not self._wraps and self._key is not None
        self._value = []
        return text + self._opener(key) + '"' if self._direct else text

    def take(self, text: str) -> str:
        """More of the value."""
        if self._direct:
            return _escaped(text)
        self._value.append(text)
        return ""

    def close(self) -> str:
        """The value is complete."""
        key, self._key = self._key, None
        if key is None:
            return ""
        opener = self._opener(key)
        self._seen.add(key)
        if self._direct:
            return '"'
        value = _value_json("".join(self._value), self._string)
        if self._wraps:
            self._wrapper = value
            return ""
        return opener + value

    def finish(self) -> str:
        """The call is complete."""
        text = self._unwrapped(last=True)
        if text:
            return text
        return "}" if self._seen else "{}"

    def cut(self) -> str:
        """The output ended before the call did: what there is, if it can be shown."""
        text = self._unwrapped(last=False)
        if self._key is None or self._direct or self._string != "false":
            return text
        return text + self._opener(self._key) + "".join(self._value).lstrip()

    def _opener(self, key: str) -> str:
        return (", " if self._seen else "{") + f'"{_escaped(key)}": '

    def _unwrapped(self, *, last: bool) -> str:
        """The text of a waiting argument: the object that it wraps if it is the only one, else the argument."""
        if self._wrapper is None:
            return ""
        value, self._wrapper = self._wrapper, None
        (key,) = self._seen
        (inner,) = _parsed(value)
        text = inner if isinstance(inner, str) else value
        for wrapped in _parsed(text) if last else []:
            if isinstance(wrapped, dict) and wrapped.keys() <= self._names:
                return text.strip()
        return f'{{"{key}": {value}' + ("}" if last else "")


def _value_json(text: str, string: str | None) -> str:
    """The JSON of a parameter's value: as it stands unless it is a string or no JSON."""
    return f'"{_escaped(text)}"' if string == "true" or not _parsed(text) else text.strip()


def _parsed(text: str) -> list[Any]:
    """The one value that `text` writes in JSON; empty if it is no JSON."""
    try:
        return [read_json_text(text)]
    except ValueError:
        return []


def _escaped(text: str) -> str:
    """`text` as the inside of a JSON string; texts may be escaped in parts."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
