from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError
from rackserve.text.detokenizer import Detokenizer
from rackserve.text.parsers import ParserChoice
from rackserve.text.stops import StopFinder
from tests.text.reading import Message, read
from tests.text.small_model import byte_ids, small_tokenizer

DSML_CALL = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
HERMES_CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
CALLED = [["f", "{}"]]


@pytest.mark.parametrize(
    ("choice", "inside", "text", "expected"),
    [
        (ParserChoice(), True, f"r</think>{HERMES_CALL}", Message("", f"r</think>{HERMES_CALL}")),
        (ParserChoice("hermes"), False, HERMES_CALL, Message("", "", CALLED, [0])),
        (ParserChoice("hermes", "qwen3"), False, f"<think>r</think>{HERMES_CALL}", Message("r", "", CALLED, [0])),
        (ParserChoice("none", "qwen3"), True, "r</think>c", Message("r", "c")),
        (ParserChoice("none", "deepseek_r1"), False, "r</think>c", Message("r", "c")),
        (ParserChoice("deepseek_v41", "deepseek_v41"), True, f"r</think>{DSML_CALL}", Message("r", "", CALLED, [0])),
    ],
)
def test_a_name_chooses_what_is_read(choice: ParserChoice, inside: bool, text: str, expected: Message) -> None:
    assert read(choice.parser(inside=inside), text) == expected


@pytest.mark.parametrize(
    ("names", "flag"),
    [
        (("mistral", "none"), "tool-call-parser"),
        (("none", "granite"), "reasoning-parser"),
        (("deepseek_v41", "none"), "name it for both"),
        (("none", "deepseek_v41"), "name it for both"),
    ],
)
def test_a_name_that_is_not_known_names_its_flag(names: tuple[str, str], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ParserChoice(*names)


def test_a_stop_string_inside_a_call_ends_the_answer_and_the_call_never_finishes() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "one STOP two"}}</tool_call>'
    for size in range(1, len(text)):
        stops, parser = StopFinder(("STOP",)), ParserChoice("hermes").parser()
        pieces = [stops.feed(text[start : start + size]) for start in range(0, len(text), size)]
        assert read(parser, *pieces, stops.flush()) == Message("", "", [["f", '{"x": "one ']], [], cut=True)
        assert stops.stopped


def test_bytes_of_characters_reach_the_parser_whole() -> None:
    text = '<tool_call>{"name": "é", "arguments": {"x": "🦙"}}</tool_call>'
    detokenizer = Detokenizer(small_tokenizer())
    pieces = [detokenizer.feed(number) for number in byte_ids(text)]
    assert read(ParserChoice("hermes").parser(), *pieces) == Message("", "", [["é", '{"x": "🦙"}']], [0])
