from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.text.answers import PlainParser, ReasoningDelta
from rackserve.text.hermes_parser import HermesParser
from rackserve.text.reasoning import ThinkParser
from tests.text.reading import Message, read


def think(*pieces: str, inside: bool = False) -> Message:
    return read(ThinkParser(PlainParser(), inside=inside), *pieces)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>r</think>c", False, Message("r", "c")),
        (" \n<think>r\n</think>\n\nc", False, Message("r\n", "\n\nc")),
        ("c<think>d</think>", False, Message("", "c<think>d</think>")),
        (" c", False, Message("", " c")),
        (" <thin", False, Message("", " <thin")),
        ("r</think>c", True, Message("r", "c")),
        ("<think>r</think>c</think>", True, Message("r", "c</think>")),
        ("r </thin", True, Message("r </thin", cut=True)),
        (" ", True, Message(" ", cut=True)),
        ("", True, Message(cut=True)),
        ("", False, Message()),
    ],
)
def test_reasoning_is_told_from_what_follows(text: str, inside: bool, expected: Message) -> None:
    assert think(text, inside=inside) == think(*text, inside=inside) == expected


_parts = st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", '<tool_call>{"name": "f"}</tool_call>'])


@settings(derandomize=True, max_examples=1000, deadline=None)
@given(st.lists(_parts, max_size=8).map("".join), st.booleans(), st.integers(1, 7))
def test_what_comes_out_does_not_depend_on_cuts(text: str, inside: bool, stride: int) -> None:
    whole = read(ThinkParser(HermesParser(), inside=inside), text)
    pieces = (text[start : start + stride] for start in range(0, len(text), stride))
    assert read(ThinkParser(HermesParser(), inside=inside), *pieces) == whole


def test_calls_are_read_behind_the_reasoning_only() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    message = read(ThinkParser(HermesParser(), inside=True), f"{call}</think>{call}")
    assert message == Message(call, "", [["f", "{}"]], [0])


def test_reasoning_comes_while_the_model_writes_it() -> None:
    parser = ThinkParser(PlainParser(), inside=True)
    assert parser.feed("ab <") == [ReasoningDelta("ab ")]
    assert parser.feed("b") == [ReasoningDelta("<b")]
