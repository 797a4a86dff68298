from __future__ import annotations

import json
import random
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.text.answers import ArgumentsDelta, CallFinished, CallStarted, ContentDelta
from rackserve.text.hermes_parser import HermesParser
from tests.text.reading import Message, read

ARGUMENTS = '{"x": "a\\n\\"b\\" </tool_call>", "n": [1, {"k": null}]}'
ONE = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO = '<tool_call>{"arguments":{},"name":"g"}</tool_call>'
OUTPUT = f"Hello < there\n\n{ONE}\n{TWO}\n"
READ = Message("", "Hello < there\n\n", [["f", ARGUMENTS], ["g", "{}"]], [0, 1])


def parse(*pieces: str) -> Message:
    return read(HermesParser(), *pieces)


def test_content_then_calls_whatever_the_cut() -> None:
    assert parse(OUTPUT) == parse(*OUTPUT) == READ
    for cut in range(len(OUTPUT) + 1):
        assert parse(OUTPUT[:cut], OUTPUT[cut:]) == READ


def test_five_hundred_random_cuts_give_the_same() -> None:
    draw = random.Random(7)
    for _ in range(500):
        cuts = sorted(draw.randrange(len(OUTPUT)) for _ in range(draw.randrange(12)))
        assert parse(*(OUTPUT[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True))) == READ


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a\n"</>é🙂'), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=5,
)
_call = st.tuples(
    st.text(st.sampled_from('ab_ "<é'), min_size=1, max_size=5), st.dictionaries(st.text("xy", max_size=2), _json)
)


@settings(derandomize=True, max_examples=500, deadline=None)
@given(
    st.text(st.sampled_from("a <>\n"), max_size=8), st.lists(_call, max_size=3), st.booleans(), st.booleans(), st.integers(1, 9)
)
def test_calls_are_read_back_exactly_as_the_model_wrote_them(
    content: str, calls: list[tuple[str, dict[str, Any]]], last: bool, escaped: bool, stride: int
) -> None:
    text, expected = content, []
    for name, arguments in calls:
        written = json.dumps(arguments, ensure_ascii=escaped)
        said = json.dumps(name, ensure_ascii=escaped)
        keys = [f'"arguments": {written}', '"why": [{"name": "z"}]', f'"name": {said}']
        text += "<tool_call>\n{" + ", ".join(keys if last else keys[::-1]) + "}\n</tool_call>\n"
        expected.append([name, written])
    message = parse(*(text[start : start + stride] for start in range(0, len(text), stride)))
    assert message == Message("", content, expected, list(range(len(calls))))


_parts = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool", "{", "}", '{"name": "f", "arguments": {', '"name"', ":", ",", '"f"',
        '"arguments"', '{"name": "f", "arguments": {"x": 1}}', '{"arguments": {"y": "',
        '"', "\\", "\n", " ", "a", "<", "1", "[", "]", "null", "\x01",
    ]
)  # fmt: skip


@settings(derandomize=True, max_examples=1500, deadline=None)
@given(st.lists(_parts, max_size=10).map("".join), st.lists(st.integers(1, 60), max_size=4))
def test_nothing_a_model_writes_is_lost_depends_on_its_cuts_or_raises(text: str, cuts: list[int]) -> None:
    text = "<tool_call>" + text if cuts[:1] and cuts[0] % 2 else text
    whole = parse(text)
    assert parse(*text) == whole
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert parse(*(text[start:end] for start, end in pairwise(places))) == whole
    for index in whole.finished:
        assert isinstance(json.loads(whole.calls[index][1]), dict)
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>hello</tool_call>", "<tool_call>{}</tool_call>", '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": "f" "arguments": {}}', "<tool_call>[1]</tool_call>",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>', '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"arguments": {bad}, "name": "f"}</tool_call>', '<tool_call>{"name": "f", "name": "g"}',
    ],
)  # fmt: skip
def test_a_malformed_call_comes_out_as_content(text: str) -> None:
    assert parse("a", text, "b") == Message("", f"a{text}b", malformed=True)


def test_a_call_that_breaks_in_its_arguments_never_finishes_and_the_rest_is_content() -> None:
    message = parse('<tool_call>{"name": "f", "arguments": {"x": 1, oops}}</tool_call>')
    assert message == Message("", "oops}}</tool_call>", [["f", '{"x": 1, ']], [], malformed=True)


def test_a_missing_closing_tag_is_put_up_with_and_flagged() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}'
    assert parse(call) == Message("", "", [["f", "{}"]], [0], malformed=True)
    assert parse(call + call) == Message("", "", [["f", "{}"], ["f", "{}"]], [0, 1], malformed=True)
    assert parse(call + "\ntext") == Message("", "text", [["f", "{}"]], [0], malformed=True)


def test_a_call_without_arguments_has_none() -> None:
    assert parse('<tool_call>{"name": "f"}</tool_call>') == Message("", "", [["f", "{}"]], [0])


def test_an_answer_cut_in_a_call_never_hands_it_out_as_whole() -> None:
    for end in range(len(ONE)):
        message = parse(ONE[:end])
        assert message.finished == ([0] if "}]}}" in ONE[:end] else [])
        if not message.calls:
            assert message.content == ONE[:end]
        assert message.cut or message.finished or not end or message.content == ONE[:end]


@pytest.mark.parametrize(
    ("text", "held"), [("a <", "<"), ("a <tool", "<tool"), ("a <toll", ""), ("a\n", ""), ("a <<", "<"), ("a < b", "")]
)
def test_text_waits_only_while_it_may_be_the_beginning_of_a_call(text: str, held: str) -> None:
    deltas = HermesParser().feed(text)
    assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) + held == text


def test_arguments_come_while_the_model_writes_them() -> None:
    parser = HermesParser()
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.feed('{"x": "ab') == [CallStarted(0, "f"), ArgumentsDelta(0, '{"x": "ab')]
    assert parser.feed("c\\") == [ArgumentsDelta(0, "c\\")]
    assert parser.feed('n"}') == [ArgumentsDelta(0, 'n"}')]
    assert parser.feed("}") == [CallFinished(0)]


def test_long_answers_take_time_in_proportion_to_their_length() -> None:
    noise = ["<tool_call>" * 5_000, "<" * 50_000, ONE * 1_000, '<tool_call>{"name": "f", "arguments": {"x": "' + "a" * 100_000]
    start = time.process_time()
    for text in noise:
        parse(text)
        parse(*(text[place : place + 8] for place in range(0, len(text), 8)))
    assert time.process_time() - start < 8
