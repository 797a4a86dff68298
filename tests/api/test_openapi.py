from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from rackserve.api.contract import CONTRACTS
from rackserve.api.errors import STATUSES
from rackserve.api.http import create_app
from rackserve.api.openapi import document
from tests.api.rig import Rig, run, text


def described(rig: Rig) -> Any:
    response = run(rig.request("GET", "/openapi.json"))
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    return response.json()


async def page(request: Any) -> Response:
    return Response("hi")


def test_every_route_and_method_is_described_pages_too() -> None:
    rig = Rig(text("x"))
    rig.app = create_app(
        rig.gateway, rig.factory, rig.metrics, rig.state, pages=[Route("/", page), Route("/login", page, methods=["POST"])]
    )
    routes = {(r.path, method.lower()) for r in rig.app.routes if isinstance(r, Route) for method in r.methods or ()}
    told = described(rig)
    assert {(path, method) for path, methods in told["paths"].items() for method in methods} == routes
    names = [operation["operationId"] for methods in told["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names)) and told["paths"]["/"]["get"]["tags"] == ["page"]


def test_other_methods_are_refused_with_those_that_there_are() -> None:
    rig = Rig(text("x"))
    for path in CONTRACTS:
        methods = set(described(rig)["paths"][path])
        for method in {"get", "post", "put", "delete", "patch", "options", "trace"} - methods:
            response = run(rig.request(method.upper(), path))
            assert response.status_code == 405 and {m.strip().lower() for m in response.headers["allow"].split(",")} == methods
            assert ("type" in response.json()) == path.startswith("/v1/messages")


def test_the_description_has_exactly_the_fields_that_are_known() -> None:
    schemas = described(Rig(text("x")))["components"]["schemas"]
    tables = [table for contract in CONTRACTS.values() for table in contract.bodies]
    assert len(tables) == 8
    for table in tables:
        fields = {field.encode_name for field in msgspec.structs.fields(table.kind)}
        told = schemas[table.kind.__name__]
        assert set(told["properties"]) == fields | set(table.refused) | table.harmless
        assert set(table.required) <= set(told["required"]) and "additionalProperties" not in told
        for name in table.refused:
            if name not in fields:
                assert told["properties"][name]["enum"] == [None, *table.refused[name]]


def test_what_must_be_given_may_not_be_null_and_models_are_those_served() -> None:
    schemas = described(Rig(text("x")))["components"]["schemas"]
    assert schemas["MessageBody"]["properties"]["model"] == {"enum": ["tiny"]}
    assert schemas["ChatBody"]["properties"]["model"] == {"enum": ["tiny", None]}
    assert schemas["MessageBody"]["properties"]["max_tokens"] == {"type": "integer", "minimum": 1}
    assert {"type": "null"} not in schemas["ResponseBody"]["properties"]["input"]["anyOf"]


def test_every_status_of_an_error_stands_at_some_route_or_with_all() -> None:
    told = msgspec.json.decode(document([(path, ("GET",)) for path in CONTRACTS], ["m"], "1"))
    operations = [methods["get"] for methods in told["paths"].values()]
    statuses = {int(status) for operation in operations for status in operation["responses"]} - {200}
    assert statuses == set(STATUSES) - {405}  # which is that of methods without a description
    assert all(f"- {status}: " in told["info"]["description"] for status in STATUSES)
    generating = told["paths"]["/v1/completions"]["get"]["responses"]
    assert "retry-after" in generating["429"]["headers"] and "text/event-stream" in generating["200"]["content"]
    assert told["paths"]["/live"]["get"]["security"] == [] and "security" not in told["paths"]["/metrics"]["get"]
