from __future__ import annotations

import msgspec
import pytest

from rackserve.api.dialects.completions import CompletionBody, Completions
from rackserve.api.dialects.openai import UNSUPPORTED
from rackserve.base.errors import RequestError
from tests.api.dialects.parsing import parse, refusal


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_known_fields_without_effect_are_refused_unless_they_ask_for_nothing(field: str) -> None:
    error = refusal(msgspec.json.encode({field: ["something", 7]}))
    assert (error.param, error.code) == (field, "unsupported_parameter")
    for harmless in (None, *UNSUPPORTED[field]):
        assert parse(msgspec.json.encode({field: harmless}), CompletionBody)[1] == ()


def test_the_usual_unsupported_wishes_are_refused() -> None:
    for field, value in {"best_of": 2, "suffix": "x", "use_beam_search": True, "kv_transfer_params": {"a": 1}}.items():
        assert refusal(msgspec.json.encode({field: value})).param == field


def test_unknown_fields_pass_and_are_told() -> None:
    ask = Completions().parse(b'{"prompt": "a", "temprature": 0, "user": "u", "max_tokens": 3}', {})
    assert (ask.max_tokens, ask.unknown, ask.ignored) == (3, ("temprature",), ("user",))


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
