from __future__ import annotations

import msgspec
import pytest

from rackserve.api.errors import error_body, error_headers, failure
from rackserve.base.errors import RequestError


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("overloaded", 429, True),
        ("unavailable", 503, True),
        ("draining", 503, True),
        ("timeout", 504, False),
        ("too_large", 400, False),
        ("constraint_invalid", 400, False),
        ("constraint_dead_end", 400, False),
        ("never heard of", 500, False),
    ],
)
def test_each_way_to_fail_has_its_status(code: str, status: int, retry: bool) -> None:
    error = failure(code, "why")
    assert (error.status, error.code, str(error)) == (status, code, "why")
    assert ("retry-after" in error_headers(error)) is retry


def test_the_body_is_an_openai_error() -> None:
    body = msgspec.json.decode(error_body(RequestError("bad n", param="n", code="invalid_type")))
    assert body == {"error": {"message": "bad n", "type": "invalid_request_error", "param": "n", "code": "invalid_type"}}
    assert msgspec.json.decode(error_body(failure("internal", "")))["error"]["type"] == "server_error"


def test_a_body_left_unread_closes_the_connection() -> None:
    assert error_headers(RequestError("big", status=413))["connection"] == "close"
