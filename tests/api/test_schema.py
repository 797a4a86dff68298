from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rackserve.api.schema import _UNSUPPORTED, ChatBody, CompletionBody, parse, prompts_of
from rackserve.base.errors import RequestError


def refusal(raw: bytes, kind: Any = CompletionBody) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(raw, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (0, -1, 1.5, "x", True, [])],
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


@pytest.mark.parametrize("field", sorted(_UNSUPPORTED))
def test_known_fields_without_effect_are_refused_unless_they_ask_for_nothing(field: str) -> None:
    error = refusal(msgspec.json.encode({field: ["something", 7]}))
    assert (error.param, error.code) == (field, "unsupported_parameter")
    for harmless in (None, *_UNSUPPORTED[field]):
        assert parse(msgspec.json.encode({field: harmless}), CompletionBody)[1] == ()


def test_the_usual_unsupported_wishes_are_refused() -> None:
    for field, value in {"logit_bias": {"5": 1}, "presence_penalty": 0.5, "best_of": 2, "echo": True, "min_tokens": 3}.items():
        assert refusal(msgspec.json.encode({field: value})).param == field
    for field, value in {"tools": [{"type": "function"}], "response_format": {"type": "json_object"}}.items():
        assert refusal(msgspec.json.encode({field: value}), ChatBody).param == field


def test_unknown_fields_pass_and_are_told() -> None:
    body, unknown = parse(b'{"temprature": 0, "user": "u", "max_tokens": 3}', CompletionBody)
    assert (body.max_tokens, unknown) == (3, ("temprature",))


@pytest.mark.parametrize(
    ("stop", "stops"), [(None, ()), ([], ()), ("a", ("a",)), (["a", "bc"], ("a", "bc")), (["a"] * 4, ("a",) * 4)]
)
def test_stop_is_a_string_or_a_list(stop: object, stops: tuple[str, ...]) -> None:
    assert parse(msgspec.json.encode({"stop": stop}), CompletionBody)[0].stops() == stops


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a"] * 5, "x" * 1025])
def test_stop_strings_are_bounded(stop: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse(msgspec.json.encode({"stop": stop}), CompletionBody)[0].stops()
    assert caught.value.param == "stop"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(prompt: object, prompts: object) -> None:
    assert prompts_of(prompt) == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], [[]], ["a", ""], [[1], []], 3, {}, {"a": 1}, [1.5], [True], [1, "a"], ["a", 1], [[1], "a"], [None]],
)
def test_any_other_prompt_is_refused_by_name(prompt: object) -> None:
    with pytest.raises(RequestError) as caught:
        prompts_of(prompt)
    assert caught.value.param == "prompt"


def test_the_newer_name_of_the_token_limit_wins() -> None:
    body, _ = parse(b'{"max_tokens": 5, "max_completion_tokens": 7}', ChatBody)
    assert body.token_limit == 7
    assert parse(b'{"max_tokens": 5}', ChatBody)[0].token_limit == 5


def test_logprobs_mean_alternatives_per_token() -> None:
    assert [parse(raw, CompletionBody)[0].num_top_logprobs for raw in (b"{}", b'{"logprobs": 0}', b'{"logprobs": 3}')] == [
        -1,
        0,
        3,
    ]
    chats = (b"{}", b'{"logprobs": true}', b'{"logprobs": true, "top_logprobs": 2}', b'{"logprobs": false}')
    assert [parse(raw, ChatBody)[0].num_top_logprobs for raw in chats] == [-1, 0, 2, -1]
