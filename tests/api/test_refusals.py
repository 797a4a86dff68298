from __future__ import annotations

import json

import pytest

from rackserve.api.contract import CONTRACTS
from rackserve.api.dialects.shapes import MessagesError
from rackserve.api.refusals import body_for, head_of, last_event
from rackserve.base.errors import RequestError

ERROR = RequestError("gone", code="worker_lost", status=502, param="p")


def test_a_refusal_has_the_form_that_the_path_s_own_errors_have() -> None:
    for path, contract in CONTRACTS.items():
        assert ("type" in json.loads(body_for(path, ERROR))) is (contract.error is MessagesError), path


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/chat/completions", ""), ("/v1/completions", ""), ("/v1/messages", "error"), ("/v1/responses", "error")],
)
def test_the_last_event_of_a_stream_is_one_of_its_own_whatever_was_cut_off_before_it(path: str, name: str) -> None:
    cut, last, rest = (b'data: {"tex' + last_event(path, ERROR)).decode().split("\n\n")
    told, _, data = last.rpartition("data: ")
    assert (cut, told, rest) == ('data: {"tex', f"event: {name}\n" if name else "", "")
    assert json.loads(data)["error"]["message"] == "gone" and json.loads(data).get("type", "") == name


def test_a_response_says_how_long_it_is_and_is_json_unless_told_otherwise() -> None:
    head = head_of(502, {"x-a": "b"}, b"four")
    headers = dict(head["headers"])
    assert headers == {b"content-type": b"application/json", b"x-a": b"b", b"content-length": b"4"} and head["status"] == 502
    assert dict(head_of(200, {"content-type": "text/html"}, b"")["headers"])[b"content-type"] == b"text/html"
