"""Errors that no dialect tells, as clients of a path expect them: of the door, of admission, of the router, of no path."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from rackserve.api.dialects.message_reply import message_error
from rackserve.api.errors import error_body, error_headers
from rackserve.base.errors import RequestError


def body_for(path: str, error: RequestError) -> bytes:
    """The body of a response that is an error, as JSON."""
    return msgspec.json.encode(message_error(error)) if path.startswith("/v1/messages") else error_body(error)


def last_event(path: str, error: RequestError) -> bytes:
    """What ends a stream that breaks off, in the middle of an event, too: that one is ended first."""
    if path in ("/v1/messages", "/v1/responses"):  # their events have names
        return b"\n\nevent: error\ndata: " + msgspec.json.encode(message_error(error)) + b"\n\n"
    return b"\n\ndata: " + error_body(error) + b"\n\n"


def head_of(status: int, headers: Mapping[str, str], body: bytes) -> Message:
    """The ASGI message with which a response begins that has this `body`, JSON unless `headers` say otherwise."""
    told = {"content-type": "application/json", **headers, "content-length": str(len(body))}
    raw = [(name.encode(), value.encode()) for name, value in told.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


async def refuse_path(request: Request, error: Exception) -> Response:
    """Starlette's handler of unknown paths and methods: they get an error body like any other."""
    assert isinstance(error, HTTPException)
    path, status = request.url.path, error.status_code
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "bad_request")
    told = RequestError(f"{request.method} {path[:200]}: {error.detail}", code=code, status=status)
    return Response(body_for(path, told), status, headers={**error_headers(told), **(error.headers or {})})
