"""Reading request bodies: types and ranges checked, fields nobody knows found, errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from rackserve.base.errors import RequestError

_TYPE_IS_RIGHT = re.compile(
    r"Expected `\w+` (?:[<>]|of length|matching|multiple)|Invalid enum value|(?:Integer|Number) out of range"
)
"""How the decoder begins to say that a value is of the right type, and not one of those allowed."""

INSTEAD = {
    **{f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("choice", "grammar", "json", "regex")},
    "guided_decoding_backend": "structured_outputs alone",
    "guided_whitespace_pattern": "structured_outputs alone",
}
"""Fields of other servers that are refused, and what does here what they do there."""

Body = TypeVar("Body", bound=msgspec.Struct)


class Read(NamedTuple, Generic[Body]):
    """A body that was read. `unknown`: its fields that nobody knows; `ignored`: those that change nothing here."""

    body: Body
    unknown: tuple[str, ...]
    ignored: tuple[str, ...]


class Table(msgspec.Struct, Generic[Body], frozen=True):
    """All that is known of the bodies of one endpoint: how they are read, and what the API's own description says of them.

    kind      the fields that have an effect
    required  those of them that must be given
    refused   fields whose meaning is known and that nothing is done about, with the values that ask for nothing (besides null)
    harmless  fields that are let through as they change nothing a client could miss in the answer
    """

    kind: type[Body]
    required: tuple[str, ...] = ()
    refused: Mapping[str, tuple[Any, ...]] = {}
    harmless: frozenset[str] = frozenset()

    def read(self, raw: bytes) -> Read[Body]:
        """The body in `raw` JSON. Raises RequestError naming the field at fault."""
        body, others = parse(raw, self.kind, self.refused, self.harmless)
        for name in self.required:
            if getattr(body, name) is None:
                raise RequestError(f"{name} is missing", param=name, code="missing_required_parameter")
        unknown = tuple(name for name in others if name not in self.harmless)
        return Read(body, unknown, tuple(name for name in others if name in self.harmless))


def parse(
    raw: bytes, kind: type[Body], without_effect: Mapping[str, tuple[Any, ...]], harmless: frozenset[str] = frozenset()
) -> tuple[Body, tuple[str, ...]]:
    """The body in `raw` JSON, and the names of fields that `kind` does not have.

    without_effect: fields whose meaning is known and that nothing is done about, with the values that ask for nothing
    (besides null). Most bodies have, besides these, no field but the `harmless`: such a one is read once. Raises RequestError
    naming the field for a wrong type, a value out of range, or a field of those that does ask for something.
    """
    closed = _closed(kind, frozenset(without_effect), harmless)
    try:
        body = msgspec.json.decode(raw, type=closed)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return _parse_open(raw, kind, without_effect)  # the long way tells what is wrong, if anything is
    others: list[str] = []
    for name in closed.__struct_fields__[len(kind.__struct_fields__) :]:
        value = getattr(body, name)
        if value is not msgspec.UNSET and name in without_effect:
            _refuse_effect(name, msgspec.json.decode(value), without_effect[name])
        elif value is not msgspec.UNSET:
            others.append(name)
    return body, tuple(others)


@cache
def _closed(kind: type[Body], *names: frozenset[str]) -> type[Body]:
    """`kind` with fields of these names besides, and no others."""
    more = sorted(frozenset().union(*names).difference(kind.__struct_encode_fields__))
    fields = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.field(default=msgspec.UNSET)) for name in more]
    made = msgspec.defstruct(kind.__name__, fields, bases=(kind,), frozen=True, kw_only=True, forbid_unknown_fields=True)
    return cast("type[Body]", made)


def _parse_open(raw: bytes, kind: type[Body], without_effect: Mapping[str, tuple[Any, ...]]) -> tuple[Body, tuple[str, ...]]:
    """As `parse`, of a body with any fields."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body = _decode(raw, kind)
        known = frozenset(kind.__struct_encode_fields__)  # `msgspec.structs.fields` reads all annotations, each time
        unknown = [name for name in fields if name not in known]
        for name in unknown:
            if name in without_effect:
                _refuse_effect(name, msgspec.json.decode(fields[name]), without_effect[name])
    except msgspec.ValidationError as error:
        message, param = _locate(str(error))
        code = "invalid_value" if _TYPE_IS_RIGHT.match(str(error)) else "invalid_type"
        raise RequestError(message, param=param, code=code) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    return body, tuple(name for name in unknown if name not in without_effect)


def _decode(raw: bytes, kind: type[Body]) -> Body:
    """The body in `raw`. A whole number may be written with a point, as 5.0: to JSON it is the same number."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    return msgspec.convert(_with_whole_numbers(msgspec.json.decode(raw)), kind)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    return {name: _with_whole_numbers(each) for name, each in value.items()} if isinstance(value, dict) else value


def _refuse_effect(name: str, value: Any, asks_nothing: tuple[Any, ...]) -> None:
    nothing = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in asks_nothing)
    if value is not None and not nothing:
        remedy = f"use {INSTEAD[name]}" if name in INSTEAD else "leave it out"
        raise RequestError(f"{name} is not supported; {remedy}", param=name, code="unsupported_parameter")


def _locate(text: str) -> tuple[str, str | None]:
    """The validation message with the field first, and the field's name."""
    found = re.fullmatch(r"(.*?) - at `\$\.?(.*)`", text, re.DOTALL)
    if found is None or not found[2] or found[2].startswith("["):
        return f"the body is invalid: {text}", None
    where = found[2]
    return f"{where}: {found[1]}", where if where.startswith("messages[") else where.split("[")[0]
