"""The API's own description (OpenAPI 3.1), made from the tables that read requests and the contracts of the routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rackserve.api.admission import DEADLINE, MAX_DEADLINE_S
from rackserve.api.contract import CONTRACTS, EVENTS, JSON, Contract
from rackserve.api.dialects.body import Table
from rackserve.api.dialects.openai import MAX_SESSION_CHARACTERS, SESSION_HEADERS
from rackserve.api.dialects.parts import KEY
from rackserve.api.endpoint import IGNORED
from rackserve.api.errors import STATUSES

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_KEYS: Json = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_EVENT: Json = {
    "type": "object",
    "description": "Each event; `data` is JSON, or [DONE] at the end of the first two dialects' streams",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_AGAIN = {"retry-after": {"description": "Seconds to wait", "schema": {"type": "integer", "minimum": 1}}}


def document(routes: Iterable[tuple[str, Iterable[str]]], models: Sequence[str], version: str) -> bytes:
    """The description of `routes` (path, methods) that serve `models`, as JSON."""
    schemas = _Schemas(models)
    paths: dict[str, Json] = {}
    for path, methods in routes:
        contract = CONTRACTS.get(path)
        told = _page(path) if contract is None else _operation(path, contract, schemas)
        for method in sorted(methods):
            paths.setdefault(path, {})[method.lower()] = _without_content(told) if method == "HEAD" else told
    statuses = "\n".join(f"- {status}: {meaning}" for status, meaning in STATUSES.items())
    about = f"Errors, whatever the path; after the first byte of a stream they are events of it:\n{statuses}\n"
    described = {
        "openapi": "3.1.0",
        "info": {"title": "rackserve", "version": version, "description": about},
        "security": [{name: []} for name in _KEYS],
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": _KEYS},
    }
    return msgspec.json.encode(described)


class _Schemas:
    """The schemas that operations refer to."""

    def __init__(self, models: Sequence[str]) -> None:
        self.components: dict[str, Json] = {}
        self._models = models

    def shape(self, kind: type[msgspec.Struct]) -> Json:
        """A reference to the schema of `kind`."""
        (reference,), components = msgspec.json.schema_components((kind,), ref_template=_REF)
        self.components |= {name: _filled_in(schema) for name, schema in components.items()}
        return reference

    def table(self, table: Table[Any]) -> Json:
        """A reference to the schema of the bodies that `table` reads."""
        reference = self.shape(table.kind)
        schema = self.components[table.kind.__name__]
        fields: Json = schema["properties"]
        if "model" in fields:
            fields["model"] = {"enum": [*self._models, None]}
        for name in table.required:
            fields[name] = _not_null(fields[name])
            schema["required"] = sorted({*schema.get("required", ()), name})
        for name, nothing in table.refused.items():
            if name not in fields:
                fields[name] = {
                    "enum": [None, *nothing],
                    "description": "Not supported: only what asks for nothing is let through.",
                }
        for name in table.harmless:
            fields.setdefault(name, {"description": f"Without effect; the answer's {IGNORED} names it."})
        return reference


def _filled_in(schema: Any) -> Any:
    """`schema` with what fields carry of nested parts in its place."""
    if isinstance(schema, list):
        return [_filled_in(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {name: _filled_in(each) for name, each in schema.items() if name != KEY}
    return own | schema.get(KEY, {})


def _not_null(schema: Json) -> Json:
    """`schema` of a field that may not be left out."""
    schema = {name: value for name, value in schema.items() if name != "default"}
    if "enum" in schema:
        return {**schema, "enum": [value for value in schema["enum"] if value is not None]}
    if "anyOf" not in schema:
        return schema
    kinds = [kind for kind in schema["anyOf"] if kind != {"type": "null"}]
    return kinds[0] if len(kinds) == 1 else {**schema, "anyOf": kinds}


def _operation(path: str, contract: Contract, schemas: _Schemas) -> Json:
    answer = {"type": "object"} if contract.answer is None else schemas.shape(contract.answer)
    content = {media: {"schema": {JSON: answer, EVENTS: _EVENT}.get(media, {"type": "string"})} for media in contract.media}
    told: Json = {"operationId": path.strip("/").replace("/", "_"), "summary": contract.summary}
    told["responses"] = {"200": {"description": "The answer", "content": content}}
    if contract.bodies:
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": _body(contract, schemas)}}}
        told["parameters"] = _headers(contract)
    if contract.session:
        ignored = {
            "description": "What of the request had no effect, fields that nobody knows included",
            "schema": {"type": "string"},
        }
        told["responses"]["200"]["headers"] = {IGNORED: ignored}
    failed = contract.answer if contract.open else contract.error
    assert failed is not None
    for status in contract.statuses:
        error = schemas.shape(failed if contract.open and status == 503 else contract.error)
        told["responses"][str(status)] = {
            "description": STATUSES[status],
            "content": {JSON: {"schema": error}},
            **({"headers": _AGAIN} if status in (429, 503) and not contract.open else {}),
        }
    if contract.open:
        told["security"] = []
    return told


def _body(contract: Contract, schemas: _Schemas) -> Json:
    bodies = [schemas.table(table) for table in contract.bodies]
    body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
    return body if contract.extra is None else {"allOf": [body, schemas.table(contract.extra)]}


def _headers(contract: Contract) -> list[Json]:
    seconds = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S}
    found: list[Json] = [
        {"name": DEADLINE, "in": "header", "schema": seconds, "description": "Seconds that the call may last in all"}
    ]
    if contract.session:
        name = {"type": "string", "maxLength": MAX_SESSION_CHARACTERS}
        text = "The conversation that the request belongs to"
        found += [{"name": each, "in": "header", "schema": name, "description": text} for each in SESSION_HEADERS]
    return found


def _page(path: str) -> Json:
    """A route for people: its content is up to it."""
    return {
        "operationId": f"page_{path.strip('/') or 'index'}",
        "tags": ["page"],
        "responses": {"default": {"description": "A page"}},
    }


def _without_content(told: Json) -> Json:
    responses = {
        status: {name: value for name, value in response.items() if name != "content"}
        for status, response in told["responses"].items()
    }
    return {**told, "operationId": f"{told['operationId']}_head", "responses": responses}
