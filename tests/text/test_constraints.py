from __future__ import annotations

import json
import random
import re
import time
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint
from rackserve.text.constraints import MAX_TEXT_BYTES, ConstraintCompiler, Matcher
from rackserve.text.tokenizer import Tokenizer, unpack
from tests.text.deepseek import deepseek_tokenizer
from tests.text.small_model import EOS, START, small_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
RECURSIVE = {
    "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
    "$ref": "#/$defs/n",
}


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


@lru_cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(small_tokenizer(), vocab_size=small_tokenizer().vocab_size + 40)


def allowed(matcher: Matcher) -> set[int]:
    mask = matcher.mask()
    return {place for place in range(8 * len(mask)) if mask[place // 8] >> place % 8 & 1}


def takes(constraint: Constraint, text: str, *, tokenizer: Tokenizer | None = None) -> bool:
    """Whether the whole of `text` may be the output."""
    tokenizer = tokenizer or small_tokenizer()
    matcher = (compiler() if tokenizer is small_tokenizer() else ConstraintCompiler(tokenizer))(constraint)
    try:
        for token in unpack(tokenizer.encode(text)):
            matcher.accept(token)
    except RequestError:
        return False
    return matcher.is_done or not allowed(matcher).isdisjoint(tokenizer.eos_ids)


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (schema(SCHEMA), ['{"a": 12, "b": "x"}', '{"a":-1,\n "b":"é"}'], ['{"a": "12"}', '{"a": 1}', "[]", "", '{"b": "z"}']),
        (Constraint("json_object"), ["{}", '{"x": [1, null]}'], ["[]", "1", ""]),
        (Constraint("regex", "a+(b|é)?"), ["a", "aaab", "aé"], ["b", "", "aab "]),
        (Constraint("grammar", 'start: "(" start ")" | "x"'), ["x", "((x))"], ["((x)", "y"]),
        (Constraint("choice", json.dumps(["yes", "no way", 'q"\n\\', "é"])), ["yes", "no way", 'q"\n\\', "é"], ["no", ""]),
        (schema(RECURSIVE), ["{}", '{"c": {"c": {}}}'], ['{"d": {}}', '{"c": 1}']),
    ],
)  # fmt: skip
def test_what_meets_the_constraint_is_taken_and_nothing_else(constraint: Constraint, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert takes(constraint, text), text
    for text in bad:
        assert not takes(constraint, text), text


def test_the_same_holds_for_the_vocabulary_of_deepseek() -> None:
    tokenizer = deepseek_tokenizer()
    matcher = ConstraintCompiler(tokenizer)(schema(SCHEMA))
    for token in unpack(tokenizer.encode('{"a": 12, "b": "é"}')):
        assert token in allowed(matcher)
        matcher.accept(token)
    assert matcher.is_done


@pytest.mark.parametrize(
    "constraint",
    [
        schema(SCHEMA),
        Constraint("json_object"),
        Constraint("regex", "(the )+(cat|é🦙)"),
        Constraint("choice", '["the cat", "the mat"]'),
    ],
)
@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6))
def test_tokens_taken_back_leave_the_masks_there_were(constraint: Constraint, seed: int, moves: list[tuple[int, int]]) -> None:
    draw, matcher = random.Random(seed), compiler()(constraint)
    masks, tokens = [matcher.mask()], []
    for ahead, back in moves:
        for _ in range(ahead):
            choices = sorted(allowed(matcher))
            if matcher.is_done or not choices:
                break
            token = draw.choice(choices)
            matcher.accept(token)
            tokens.append(token)
            masks.append(matcher.mask())
        back = min(back, len(tokens))
        matcher.rollback(back)
        tokens, masks = tokens[: len(tokens) - back], masks[: len(masks) - back]
        assert matcher.mask() == masks[-1]
    again = compiler()(constraint)
    for token in tokens:
        again.accept(token)
    assert (again.mask(), again.is_done) == (matcher.mask(), matcher.is_done)


def test_a_token_that_may_not_come_changes_nothing() -> None:
    matcher = compiler()(Constraint("regex", "ab"))
    mask = matcher.mask()
    for token in sorted(set(range(small_tokenizer().vocab_size + 40)) - allowed(matcher)):
        with pytest.raises(RequestError, match="may not come next"):
            matcher.accept(token)
    assert matcher.mask() == mask


def test_the_end_may_come_only_where_the_output_is_complete() -> None:
    matcher = compiler()(Constraint("regex", "a+"))
    assert EOS not in allowed(matcher) and not matcher.is_done
    matcher.accept(unpack(small_tokenizer().encode("a"))[0])
    assert EOS in allowed(matcher) and not matcher.is_done
    matcher.accept(EOS)
    assert matcher.is_done


def test_special_tokens_and_ids_without_text_are_never_allowed() -> None:
    matcher = compiler()(Constraint("regex", r"(.|\n)*"))
    assert allowed(matcher).isdisjoint({START, *range(small_tokenizer().vocab_size, small_tokenizer().vocab_size + 64)})
    assert len(matcher.mask()) == (small_tokenizer().vocab_size + 40 + 31) // 32 * 4


BAD = {
    "no json": Constraint("json_schema", "{"),
    "no schema": Constraint("json_schema", '{"type": "wizard"}'),
    "itself": schema({"$ref": "#"}),
    "pattern": schema({"type": "string", "pattern": "(a"}),
    "impossible": schema({"type": "integer", "minimum": 3, "maximum": 1}),
    "deep": Constraint("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "enum": schema({"enum": [f"value {number}" for number in range(100_000)]}),
    "long": Constraint("regex", "a" * (MAX_TEXT_BYTES + 1)),
    "regex": Constraint("regex", "(a"),
    "grammar": Constraint("grammar", "start: nothing"),
    "no choice": Constraint("choice", "[]"),
    "empty choice": Constraint("choice", '[""]'),
    "choice": Constraint("choice", "[1]"),
    "surrogate": Constraint("regex", "\ud800"),
}
HEAVY = {
    "backtracking": Constraint("regex", "(a+)+$"),
    "backtracking pattern": schema({"type": "string", "pattern": "^(a+)+$"}),
    "repeats": Constraint("regex", "((a{1,100}){1,100}){1,100}"),
    "states": Constraint("regex", "(?:.*a.{20}){20}"),
    "min items": schema({"type": "array", "items": {"type": "string"}, "minItems": 1_000_000}),
    "many": schema({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}),
    "values": schema({"enum": [f"value {number}" for number in range(10_000)]}),
    "any": schema({"anyOf": [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(1000)]}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_constraint_that_is_none_is_refused_with_a_reason(name: str) -> None:
    start = time.process_time()
    with pytest.raises(RequestError) as caught:
        compiler()(BAD[name])
    assert caught.value.code == "invalid_constraint"
    assert re.match(rf"the {BAD[name].kind} .+", str(caught.value)) and len(str(caught.value)) < 400
    assert time.process_time() - start < 1


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_constraint_is_ready_or_refused_within_a_second(name: str) -> None:
    start = time.process_time()
    try:
        matcher = compiler()(HEAVY[name])
        for token in unpack(small_tokenizer().encode("aaaaaaaaaaaaaaaaaaaaaaaa")):
            matcher.accept(token)
            matcher.mask()
    except RequestError:
        pass
    assert time.process_time() - start < 1
