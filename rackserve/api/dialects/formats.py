"""What form an answer must have, as every dialect says it, and as the engine keeps to it."""

from __future__ import annotations

from typing import Any

import msgspec

from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint

MAX_CHOICES = 10_000


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At most one of them. json: a schema, as an object or as JSON; grammar: in Lark form."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def constraint_of_format(response_format: dict[str, Any] | None, field: str) -> Constraint | None:
    """The constraint of a response format in the chat-completions shape. Raises RequestError naming `field`."""
    if response_format is None or response_format.get("type") == "text":
        return None
    if response_format.get("type") == "json_object":
        return Constraint("json_object")
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if response_format.get("type") != "json_schema" or not isinstance(schema, dict | bool):
        text = f'{field}.type must be "text", "json_object", or "json_schema" with json_schema.schema'
        raise RequestError(text, param=field)
    return Constraint("json_schema", msgspec.json.encode(schema).decode())


def constraint_of(outputs: StructuredOutputs | None) -> Constraint | None:
    """The constraint that `structured_outputs` names. Raises RequestError naming the field."""
    if outputs is None:
        return None
    found: list[Constraint] = []
    if outputs.json is not None:
        schema = outputs.json if isinstance(outputs.json, str) else msgspec.json.encode(outputs.json).decode()
        found.append(Constraint("json_schema", schema))
    if outputs.regex is not None:
        found.append(Constraint("regex", outputs.regex))
    if outputs.choice is not None:
        if not 1 <= len(outputs.choice) <= MAX_CHOICES or not all(outputs.choice):
            text = f"structured_outputs.choice needs 1 to {MAX_CHOICES} strings, none empty"
            raise RequestError(text, param="structured_outputs.choice")
        found.append(Constraint("choice", msgspec.json.encode(outputs.choice).decode()))
    if outputs.grammar is not None:
        found.append(Constraint("grammar", outputs.grammar))
    if outputs.json_object:
        found.append(Constraint("json_object"))
    if len(found) > 1:
        kinds = " and ".join(constraint.kind for constraint in found)
        raise RequestError(f"structured_outputs: only one kind at once, got {kinds}", param="structured_outputs")
    return found[0] if found else None
