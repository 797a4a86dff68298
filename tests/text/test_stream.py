"""The whole way of an answer's text, from tokens to pieces: streamed equals not streamed, however tokens are grouped."""

from __future__ import annotations

import random

from rackserve.text.detokenizer import Detokenizer
from rackserve.text.parsers import ParserChoice
from rackserve.text.stops import StopFinder
from rackserve.text.tokenizer import unpack
from tests.text.reading import Message, read
from tests.text.small_model import EOS, START, byte_ids, small_tokenizer

CASES = 10_000
CHOICES = [
    ParserChoice(),
    ParserChoice("hermes"),
    ParserChoice("hermes", "qwen3"),
    ParserChoice("none", "deepseek_r1"),
    ParserChoice("deepseek_v41", "deepseek_v41"),
]
PARTS = [
    "a", "the cat", " ", "\n", "é", "🦙", "👩‍👩‍👧", "<", "ST", "OP", "STOP", "O", "<think>", "</think>",
    "<tool_call>", "</tool_call>",
    '{"name": "f", "arguments": {', '"x": "', '"}}', "\\", '{"name": "é🦙", "arguments": {"x": [1, "STO"]}}',
    "<｜DSML｜ calls>", '<｜DSML｜ invoke name="f">', '<｜DSML｜ parameter name="x" string="true">', "</｜DSML｜ parameter>",
    "</｜DSML｜ invoke>", "</｜DSML｜ calls>",
]  # fmt: skip
STOPS = [(), ("STOP",), ("OP", "STOPé"), ("🦙",), ("é", "TOP"), ("<", "STOP"), ('"}',), ("cat sat", "a")]


BYTES = byte_ids(bytes(range(256)))
"""The token of each byte."""


def ids_of(draw: random.Random, text: str) -> list[int]:
    """Tokens of `text`: its bytes, or merged ones; now and then a special token or half a character in between."""
    tokenizer = small_tokenizer()
    ids = [BYTES[byte] for byte in text.encode()] if draw.random() < 0.6 else list(unpack(tokenizer.encode(text)))
    for _ in range(draw.randrange(3) if draw.random() < 0.3 else 0):
        ids.insert(draw.randrange(len(ids) + 1), draw.choice([EOS, START, BYTES[0xF0], BYTES[0x99]]))
    return ids


def expected(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    places = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(places)], True) if places else (text, False)


def test_streamed_equals_whole_for_ten_thousand_answers_stops_and_groupings() -> None:
    draw, stopped, called = random.Random(20), 0, 0
    for number in range(CASES):
        choice, stops = CHOICES[number % len(CHOICES)], draw.choice(STOPS)
        ids = ids_of(draw, "".join(draw.choices(PARTS, k=draw.randrange(1, 9))))
        text, stop = expected(small_tokenizer().decode(ids), stops)
        whole = read(choice.parser(), text)
        detokenizer, finder = Detokenizer(small_tokenizer()), StopFinder(stops)
        pieces, shown = [], ""
        while ids and not finder.stopped:
            size = draw.randrange(1, 5)
            piece = finder.feed("".join(map(detokenizer.feed, ids[:size])))
            ids, shown = ids[size:], shown + piece
            assert text.startswith(shown), "a part of a stop string, or of a character, was shown"
            pieces.append(piece)
        if not finder.stopped:
            pieces += [finder.feed(detokenizer.flush()), finder.flush()]
        assert ("".join(pieces), finder.stopped) == (text, stop)
        assert read(choice.parser(), *pieces) == whole
        stopped, called = stopped + stop, called + bool(whole.calls)
    assert stopped > CASES / 10 and called > CASES / 200  # else the cases are too tame


def test_a_character_is_never_shown_in_halves() -> None:
    detokenizer, finder = Detokenizer(small_tokenizer()), StopFinder(("🦙b",))
    pieces = [finder.feed(detokenizer.feed(number)) for number in byte_ids("a🦙c")]
    assert "".join(pieces) == "a🦙c" and not any("\ufffd" in piece for piece in pieces)
    assert read(ParserChoice().parser(), *pieces) == Message("", "a🦙c")
