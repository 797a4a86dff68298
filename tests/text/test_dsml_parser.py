from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.text.answers import ArgumentsDelta, CallFinished, CallStarted, ContentDelta
from rackserve.text.detokenizer import Detokenizer
from rackserve.text.dsml import ChatOptions, DsmlTemplate
from rackserve.text.dsml_parser import MAX_HEADER, DsmlParser
from rackserve.text.tokenizer import unpack
from tests.text.deepseek import deepseek_tokenizer
from tests.text.reading import Message, read

CALLS, CALLS_END = "<｜DSML｜ calls>", "</｜DSML｜ calls>"
END, STOP = "</｜DSML｜ parameter>", "</｜DSML｜ invoke>"
KNOWN = {"f": frozenset({"x", "y"})}


def invoke(name: str) -> str:
    return f'<｜DSML｜ invoke name="{name}">'


def parameter(key: str, string: str) -> str:
    return f'<｜DSML｜ parameter name="{key}" string="{string}">'


def parse(*pieces: str, reasoning: bool = False, tools: dict[str, frozenset[str]] | None = None) -> Message:
    return read(DsmlParser(reasoning=reasoning, tools=tools), *pieces)


ONE = f'{invoke("f")}\n{parameter("x", "true")}a\n"b" <{END}\n{parameter("n", "false")}[1, {{"k": null}}]{END}\n{STOP}'
TWO = f"{invoke('g')}\n\n{STOP}"
OUTPUT = f"think <hard>\n</think>\n\nHello\n\n\n\n{CALLS}\n{ONE}\n{TWO}\n{CALLS_END}"
PARSED = Message(
    "think <hard>\n", "\n\nHello\n\n", [["f", '{"x": "a\\n\\"b\\" <", "n": [1, {"k": null}]}'], ["g", "{}"]], [0, 1]
)


def test_an_output_is_reasoning_then_content_then_calls() -> None:
    assert parse(OUTPUT, reasoning=True) == PARSED


def test_every_cut_in_two_and_characters_alone_give_the_same() -> None:
    assert parse(*OUTPUT, reasoning=True) == PARSED
    for cut in range(len(OUTPUT) + 1):
        assert parse(OUTPUT[:cut], OUTPUT[cut:], reasoning=True) == PARSED


def test_five_hundred_random_cuts_give_the_same() -> None:
    draw = random.Random(7)
    for _ in range(500):
        cuts = sorted(draw.randrange(len(OUTPUT)) for _ in range(draw.randrange(12)))
        pieces = [OUTPUT[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
        assert parse(*pieces, reasoning=True) == PARSED


def test_tokens_one_by_one_give_the_same() -> None:
    tokenizer = deepseek_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(number) for number in unpack(tokenizer.encode(OUTPUT))]
    assert parse(*pieces, detokenizer.flush(), reasoning=True) == PARSED


def strict(text: str, *, reasoning: bool) -> Message:
    """The grammar, as one pass over a whole output that keeps to it."""
    thought, text = text.split("</think>", 1) if reasoning else ("", text)
    content, opened, block = text.partition(f"\n\n{CALLS}\n")
    calls = []
    for name, body in re.findall(r'<｜DSML｜ invoke name="(.*?)">\n(.*?)\n</｜DSML｜ invoke>\n', block, re.DOTALL):
        found = re.findall(r'<｜DSML｜ parameter name="(.*?)" string="(.*?)">(.*?)</｜DSML｜ parameter>', body, re.DOTALL)
        calls.append([name, {key: text if string == "true" else json.loads(text) for key, string, text in found}])
    assert bool(calls) == bool(opened)
    return Message(thought, content, calls, list(range(len(calls))))


_text = st.text(st.sampled_from('a\n "<>/｜é🙂'), max_size=12)
_key = st.text(st.sampled_from("ab_.> é"), min_size=1, max_size=4)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=5,
)
_call = st.tuples(_key, st.dictionaries(_key, _json, max_size=4))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(_text, _text, st.lists(_call, max_size=3), st.booleans(), st.integers(1, 7))
def test_what_the_template_writes_is_read_back(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], thinks: bool, stride: int
) -> None:
    made = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in calls]
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made}
    options = ChatOptions(thinking_mode="thinking" if thinks else "chat")
    question = {"role": "user", "content": "q"}
    text = DsmlTemplate().render([question, answer], options).removeprefix(DsmlTemplate().render([question], options))
    text = text[: text.rindex("<｜end▁of▁sentence｜>")]
    message = parse(*(text[start : start + stride] for start in range(0, len(text), stride)), reasoning=thinks)
    for call in message.calls:
        call[1] = json.loads(call[1])
    assert message == Message(reasoning if thinks else "", content, [list(call) for call in calls], list(range(len(calls))))
    assert message == strict(text, reasoning=thinks)


_parts = st.sampled_from(
    [
        "a", "<", "\n", "\n\n", " ", '"', "<think>", "</think>", CALLS, CALLS_END, invoke("f"), invoke(""), "<｜DSML｜ invoke",
        parameter("x", "true"), parameter("input", "false"), parameter("y", "no"), '<｜DSML｜ parameter name="y">', END, STOP,
        "<｜DSML｜", '{"x": 1}', "｜DSML｜", ">", " name=", "<｜DSML｜ parameter",
    ]
)  # fmt: skip


@settings(derandomize=True, max_examples=250, deadline=None)
@given(st.lists(_parts, max_size=12).map("".join), st.booleans())
def test_nothing_a_model_writes_depends_on_its_cuts_or_raises(text: str, reasoning: bool) -> None:
    whole = parse(text, reasoning=reasoning, tools=KNOWN)
    for cut in range(1, len(text)):
        assert parse(text[:cut], text[cut:], reasoning=reasoning, tools=KNOWN) == whole
    for index in whole.finished:
        assert isinstance(json.loads(whole.calls[index][1]), dict)
    assert len(whole.calls) - len(whole.finished) == (1 if whole.calls and len(whole.calls) - 1 not in whole.finished else 0)
    if len(whole.finished) < len(whole.calls):
        assert whole.cut


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("a <", "<"), ("a <｜", "<｜"), ("a\n\n<｜DSML｜ ca", "\n\n<｜DSML｜ ca"), ("a\n\n\n", "\n\n"), ("a</thin", "</thin"),
        ("a <b", ""), ("a <｜DSML｜ cat", ""), ("a <｜DSML｜calls", ""), ("x < y > z", ""),
    ],
)  # fmt: skip
def test_text_waits_only_while_it_may_be_the_beginning_of_a_tag(text: str, held: str) -> None:
    parser = DsmlParser(reasoning=False)
    assert "".join(delta.text for delta in parser.feed(text) if isinstance(delta, ContentDelta)) + held == text


def test_arguments_come_while_the_model_writes_them() -> None:
    parser = DsmlParser(reasoning=False)
    assert parser.feed(f"{CALLS}\n{invoke('f')}") == [CallStarted(0, "f")]
    assert parser.feed(f"\n{parameter('x', 'true')}ab") == [ArgumentsDelta(0, '{"x": "'), ArgumentsDelta(0, "ab")]
    assert parser.feed('c"') == [ArgumentsDelta(0, 'c\\"')]
    assert parser.feed(f"{END}\n{STOP}") == [ArgumentsDelta(0, '"'), ArgumentsDelta(0, "}"), CallFinished(0)]


X1 = parameter("x", "true") + "1"
CALL_X, CALL_G = ["f", '{"x": "1"}'], ["g", "{}"]
OPEN, CLOSE, G = CALLS + invoke("f"), STOP + CALLS_END, invoke("g")
BARE = '<｜DSML｜ parameter name="x">'


@pytest.mark.parametrize(
    ("text", "reasoning", "expected"),
    [
        ("<think>r</think>c", True, Message("r", "c")),  # thinking begins twice
        ("r<think>s</think>c", True, Message("rs", "c")),
        ("r</think></think>c", True, Message("r", "c")),
        ("</think>c", False, Message("", "c")),
        ("<think>r</think>c", False, Message("r", "c")),  # thinks although not asked to
        ("c<think>d", False, Message("", "cd")),
        (f"r\n\n{CALLS}\n{invoke('f')}\n{X1}{END}\n{STOP}\n{CALLS_END}", True, Message("r", "", [CALL_X], [0])),
        (f"c\n{invoke('f')}\n{X1}{END}\n{STOP}", False, Message("", "c", [CALL_X], [0])),  # no block around it
        (f"c{invoke('f')}{X1}{END}{STOP}{G}{STOP}", False, Message("", "c", [CALL_X, CALL_G], [0, 1])),
        (f"{OPEN}{BARE}1{END}{CLOSE}", False, Message("", "", [["f", '{"x": 1}']], [0])),
        (f"{OPEN}{BARE}a{END}{CLOSE}", False, Message("", "", [["f", '{"x": "a"}']], [0])),
        (f"{OPEN}{X1}{parameter('y', 'true')}2{END}{CLOSE}", False, Message("", "", [["f", '{"x": "1", "y": "2"}']], [0])),
        (f"{OPEN}{X1}{END}{X1}{END}{CLOSE}", False, Message("", "", [CALL_X], [0])),  # twice the same
        (f"{OPEN}{X1}{END}{CALLS_END}", False, Message("", "", [CALL_X], [0])),  # a call not closed
        (f"{OPEN}{X1}{END}{G}{CLOSE}", False, Message("", "", [CALL_X, CALL_G], [0, 1])),
        (f"{OPEN}oops<{X1}{END}{CLOSE}", False, Message("", "", [CALL_X], [0])),
        (f"{OPEN}<｜DSML｜ parameter key=\"x\">1{END}{CLOSE}", False, Message("", "", [["f", "{}"]], [0])),
        (f"{OPEN}{X1}{END}{CLOSE}\nThat is all.", False, Message("", "", [CALL_X], [0])),
        (f"{OPEN}{X1}{END}{STOP} and {G}{CLOSE}", False, Message("", "", [CALL_X, CALL_G], [0, 1])),
        (f"c\n\n{CALLS}\n{CALLS_END}", False, Message("", "c")),
        (f"c\n\n{CALLS}\nis the tag", False, Message("", f"c\n\n{CALLS}\nis the tag")),  # no block, but text about it
        (f"the {CALLS} tag</think>c", True, Message(f"the {CALLS} tag", "c")),
        ("<｜DSML｜ invoke it>c", False, Message("", "<｜DSML｜ invoke it>c")),
        ("<｜DSML｜ invoke name=\"f\n\">c", False, Message("", "<｜DSML｜ invoke name=\"f\n\">c")),
        (f"{invoke('f' * MAX_HEADER)}c", False, Message("", f"{invoke('f' * MAX_HEADER)}c")),
    ],
)  # fmt: skip
def test_what_models_get_wrong_is_put_up_with_and_flagged(text: str, reasoning: bool, expected: Message) -> None:
    message = parse(text, reasoning=reasoning)
    expected.malformed = True
    assert message == expected


def test_a_wrapper_is_unwrapped_for_a_known_tool_only() -> None:
    text = f'{CALLS}\n{invoke("f")}\n{parameter("arguments", "false")}{{"x": 1}}{END}\n{STOP}\n{CALLS_END}'
    assert parse(text, tools=KNOWN).calls == [["f", '{"x": 1}']]
    assert parse(text).calls == [["f", '{"arguments": {"x": 1}}']]


def test_text_that_only_resembles_the_markup_stays_text() -> None:
    text = 'if a < b: "<｜DSML｜calls>" <invoke name="f"> </calls> \n\n\n'
    assert parse(text) == Message("", text)


def test_a_value_may_hold_any_tag_but_those_that_end_it() -> None:
    value = f"<think></think>{CALLS}{invoke('g')}{STOP}{CALLS_END}<｜DSML｜ parameter>"
    text = f"{CALLS}\n{invoke('f')}\n{parameter('x', 'true')}{value}{END}\n{STOP}\n{CALLS_END}"
    assert parse(text).calls == [["f", json.dumps({"x": value}, ensure_ascii=False)]]


def test_an_output_cut_anywhere_never_hands_out_half_a_call_as_whole() -> None:
    tokenizer = deepseek_tokenizer()
    ids = unpack(tokenizer.encode(OUTPUT))
    for end in range(len(ids)):
        text = tokenizer.decode(ids[:end])
        message = parse(text, reasoning=True)
        assert PARSED.reasoning.startswith(message.reasoning)
        assert (PARSED.content + "\n\n<").startswith(message.content)  # a lone "<" may be text
        assert message.finished == [0, 1][: text.count(STOP)]
        for call, whole in zip(message.calls, PARSED.calls, strict=False):
            assert call[0] == whole[0] and whole[1].startswith(call[1].rstrip("</"))
        assert message.cut or ("</think>" in text and "｜DSML｜" not in text)
        assert not message.malformed


def test_an_unfinished_answer_is_delivered_as_far_as_it_goes() -> None:
    message = parse(f"c\n\n{CALLS}\n{invoke('f')}\n{parameter('x', 'true')}half <")
    assert message == Message("", "c", [["f", '{"x": "half <']], [], cut=True)
    assert parse("r <", reasoning=True) == Message("r <", cut=True)
    assert parse("c\n\n<") == Message("", "c\n\n<")


def test_long_outputs_take_time_in_proportion_to_their_length() -> None:
    noise = [
        "</think>" * 20_000, "<" * 100_000, "\n" * 100_000, f"{CALLS}{invoke('f')}" + "x" * 50_000, f"{CALLS} " * 5_000,
        f"{CALLS}{invoke('f')}{parameter('x', 'false')}" + "[" * 100_000,
    ]  # fmt: skip
    start = time.process_time()
    for text in noise:
        parse(text)
    assert time.process_time() - start < 5
