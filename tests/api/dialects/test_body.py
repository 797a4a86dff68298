from __future__ import annotations

import msgspec
import pytest

from rackserve.api.dialects.chat import CHAT, ChatBody
from rackserve.base.errors import RequestError
from tests.api.dialects.parsing import refusal


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (-1, 1.5, "x", True, [])],
        *[("temperature", value) for value in (-0.1, 2.1, "hot", True)],
        *[("top_p", value) for value in (0, 1.01, "x")],
        *[("top_k", value) for value in (-2, 1.5, 2**40)],
        *[("seed", value) for value in (1.5, "x", 2**63)],
        *[("n", value) for value in (0, 9, "2")],
        *[("stop", value) for value in (3, {"a": 1}, ["a", 1])],
        *[("logprobs", value) for value in (-1, 21, True)],
        *[("session_id", value) for value in ("", "x" * 257, 3)],
        *[("stream", value) for value in (1, "yes")],
        ("ignore_eos", "no"),
        ("model", 3),
    ],
)
def test_a_value_of_the_wrong_kind_names_its_field(field: str, value: object) -> None:
    error = refusal(msgspec.json.encode({field: value}))
    assert error.param == field and str(error).startswith(field)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("max_tokens", -1, "invalid_value"),
        *[("temperature", value, "invalid_value") for value in (-0.1, 2.1)],
        *[(field, value, "invalid_value") for field, value in (("n", 9), ("top_p", 0), ("stop", ["a"] * 5), ("seed", 2**63))],
        *[("max_tokens", value, "invalid_type") for value in (1.5, "x", True, [])],
        *[(field, value, "invalid_type") for field, value in (("n", "2"), ("temperature", "2.1"), ("stop", 5), ("model", 3))],
    ],
)
def test_a_value_out_of_range_is_told_from_one_of_a_wrong_type(field: str, value: object, code: str) -> None:
    assert refusal(msgspec.json.encode({field: value})).code == code


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"messages": {"a": 1}}', "messages"),
        (b'{"messages": ["hi"]}', "messages[0]"),
        (b'{"logprobs": 1}', "logprobs"),
        (b'{"stream_options": {"include_usage": 1}}', "stream_options.include_usage"),
    ],
)
def test_chat_fields_are_named_too(raw: bytes, param: str) -> None:
    assert refusal(raw, ChatBody).param == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b'{"temperature": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"\xff": 1}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"other": ' + b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    assert refusal(raw).param is None


@pytest.mark.parametrize("kind", ["choice", "grammar", "json", "regex"])
def test_a_field_of_other_servers_is_refused_with_the_name_that_it_has_here(kind: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], f"guided_{kind}": {"type": "object"}}
    with pytest.raises(RequestError, match=rf"guided_{kind} is not supported; use structured_outputs\.{kind}$"):
        CHAT.read(msgspec.json.encode(body))


def test_fields_are_told_whatever_others_the_body_has() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "user": "u", "audio": None, "functions": [], "store": True}
    for more in ({}, {"nobody_knows": 1}):
        read = CHAT.read(msgspec.json.encode({**body, **more}))
        assert read.body.messages == body["messages"] and read.unknown == tuple(more)
        assert sorted(read.ignored) == ["store", "user"]
        with pytest.raises(RequestError, match="audio is not supported"):
            CHAT.read(msgspec.json.encode({**body, **more, "audio": {}}))
