"""Failures as clients see them: HTTP status, OpenAI error body, when to try again."""

from __future__ import annotations

import msgspec

from rackserve.base.errors import RequestError
from rackserve.base.step import FAILURES

_STATUS = {
    "overloaded": 429,
    "unavailable": 503,
    "draining": 503,
    "cancelled": 503,
    "output_lost": 503,
    "timeout": 504,
    "context_length_exceeded": 400,
    "too_large": 400,
    **dict.fromkeys(FAILURES, 400),
}
"""HTTP status for each code in `Output.error`; any other code is a fault of the server (500)."""

STATUSES = {
    400: "a header or a field is wrong, or the prompt leaves no room in the context",
    401: "the key is missing or unknown",
    403: "the key may not do this, or a page of another site asks",
    404: "no such path, or no such model",
    405: "the path does not know the method",
    408: "the body did not come",
    413: "the body is too large",
    421: "the server is not known under this host name",
    429: "too much waits; Retry-After says when to come back",
    431: "the headers are too large",
    500: "a fault of the server",
    503: "not ready, shutting down, or the answer was lost; Retry-After says when to come back",
    504: "the deadline passed",
}
"""Every status that an error can have, and what it means."""

RETRY_AFTER_S = 1
"""What 429 and 503 tell the client to wait."""

_TYPES = {404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}


INTERNAL = RequestError("internal error; see the server's log", code="internal", status=500)
"""All that a client is told of a bug."""


def failure(code: str, detail: str) -> RequestError:
    """The error for a request that the rack refused or lost, from `Output.error` and `Output.detail`."""
    return RequestError(detail or code, code=code, status=_STATUS.get(code, 500))


def error_body(error: RequestError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}` as JSON."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    fields = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def error_headers(error: RequestError) -> dict[str, str]:
    """Response headers that go with the error."""
    headers = {"content-type": "application/json"}
    if error.status in (429, 503):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if error.status in (408, 413):  # the body was not read to its end
        headers["connection"] = "close"
    return headers
