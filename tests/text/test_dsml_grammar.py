from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint
from rackserve.text.answers import ArgumentsDelta
from rackserve.text.constraints import ConstraintCompiler
from rackserve.text.dsml import DsmlTemplate
from rackserve.text.dsml_grammar import call_rules
from rackserve.text.dsml_parser import DsmlParser
from rackserve.text.tokenizer import unpack
from tests.text.small_model import small_tokenizer

ADDRESS = {"type": "object", "properties": {"zip": {"type": "integer"}}, "required": ["zip"], "additionalProperties": False}
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "send",
        "parameters": {
            "type": "object",
            "$defs": {"address": ADDRESS},
            "properties": {
                "text": {"type": "string"},
                "to": {"$ref": "#/$defs/address", "type": "object"},
                "how": {"enum": ["fast", "slow"]},
                "any": {},
            },
            "required": ["text"],
        },
    },
    {"name": "stop"},
]


@lru_cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(small_tokenizer())


def meets(answer: str, most: int = 8) -> bool:
    """Whether the answer is whole under the grammar."""
    matcher = compiler()(Constraint("grammar", "\n".join(["start: calls", *call_rules(FUNCTIONS, most)])))
    try:
        for token in unpack(small_tokenizer().encode(answer)):
            matcher.accept(token)
    except RequestError:
        return False
    return matcher.is_done


def written(*calls: tuple[str, dict[str, Any]]) -> str:
    """An answer with these calls, as the model was taught to write it."""
    made = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    user = {"role": "user", "content": "hi"}
    whole = DsmlTemplate().render([user, {"role": "assistant", "content": "", "tool_calls": made}, user])
    return whole[whole.index("<｜DSML｜ calls>") : whole.rindex("</｜DSML｜ calls>")] + "</｜DSML｜ calls>"


TEXTS = st.text(st.sampled_from('ab<>/"\n\\｜é '), max_size=12)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    text=TEXTS,
    to=st.none() | st.integers(),
    how=st.sampled_from([None, "fast", "slow"]),
    extra=st.none() | TEXTS | st.lists(st.integers(), max_size=2),
)
def test_what_the_schema_allows_can_be_written_and_is_read_back(text: str, to: int | None, how: str | None, extra: Any) -> None:
    arguments = {"text": text, "to": None if to is None else {"zip": to}, "how": how, "any": extra}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    answer = written(("send", arguments))
    assert meets(answer)
    deltas = DsmlParser(reasoning=False).feed(answer)
    assert msgspec.json.decode("".join(d.text for d in deltas if isinstance(d, ArgumentsDelta))) == arguments


@pytest.mark.parametrize(
    "wrong",
    [
        "hello",
        written(("other", {})),
        written(("send", {})),  # a required argument is missing
        written(("send", {"text": "a", "how": "sideways"})),
        written(("send", {"text": "a", "to": {"zip": "x"}})),
        written(("send", {"text": "a", "more": "x"})),
        written(("stop", {})) + "and more",
        written(("stop", {})).removesuffix("</｜DSML｜ calls>"),
    ],
)
def test_what_it_does_not_allow_cannot_be_written(wrong: str) -> None:
    assert not meets(wrong)


def test_calls_are_bounded_and_one_without_arguments_is_written_in_both_ways() -> None:
    two = written(("stop", {}), ("send", {"text": "a"}))
    assert meets(two) and meets(two, most=2) and not meets(two, most=1)
    assert meets(written(("stop", {}))) and meets(written(("stop", {})).replace("\n\n", "\n"))
