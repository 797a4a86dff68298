"""Reading request bodies: types and ranges checked, fields nobody knows found, errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rackserve.base.errors import RequestError

Body = TypeVar("Body", bound=msgspec.Struct)


def parse(raw: bytes, kind: type[Body], without_effect: Mapping[str, tuple[Any, ...]]) -> tuple[Body, tuple[str, ...]]:
    """The body in `raw` JSON, and the names of fields that `kind` does not have.

    without_effect: fields whose meaning is known and that nothing is done about, with the values that ask for nothing
    (besides null). Raises RequestError naming the field for a wrong type, a value out of range, or a field of those that
    does ask for something.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(raw, type=kind)
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        unknown = [name for name in fields if name not in known]
        for name in unknown:
            if name in without_effect:
                _refuse_effect(name, msgspec.json.decode(fields[name]), without_effect[name])
    except msgspec.ValidationError as error:
        message, param = _locate(str(error))
        raise RequestError(message, param=param, code="invalid_type") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    return body, tuple(name for name in unknown if name not in without_effect)


def _refuse_effect(name: str, value: Any, asks_nothing: tuple[Any, ...]) -> None:
    if value is not None and value not in asks_nothing:
        raise RequestError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")


def _locate(text: str) -> tuple[str, str | None]:
    """The validation message with the field first, and the field's name."""
    found = re.fullmatch(r"(.*?) - at `\$\.?(.*)`", text, re.DOTALL)
    if found is None or not found[2] or found[2].startswith("["):
        return f"the body is invalid: {text}", None
    where = found[2]
    return f"{where}: {found[1]}", where if where.startswith("messages[") else where.split("[")[0]
