from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.api.answer import AnswerReader, TokenEntry
from rackserve.base.messages import Output
from rackserve.base.request import Request
from rackserve.base.step import TokenLogprobs
from tests.api.rig import cut
from tests.text.small_model import EOS, byte_ids, small_tokenizer


def read(
    ids: list[int], groups: list[int], stops: tuple[str, ...] = (), finish: str = "stop"
) -> tuple[str, list[TokenEntry], int, bool, list[str]]:
    """All that a reader shows of `ids` cut into `groups`: text, entries, tokens counted, stopped, pieces."""
    request = Request("r", "s", b"", b"", 1, 99, stop_token_ids=(EOS,))
    reader = AnswerReader(small_tokenizer(), request, stops)
    parts = cut(ids, groups)
    pieces, entries, at = [], [], 0
    for number, part in enumerate(parts):
        logprobs = tuple(TokenLogprobs(-float(at + place), ((token, -1.0),)) for place, token in enumerate(part))
        output = Output("r", at, part, finish=finish if number == len(parts) - 1 else None, logprobs=logprobs)
        piece, new = reader.read(output)
        pieces.append(piece)
        entries += new
        at += len(part)
    return "".join(pieces), entries, reader.num_tokens, reader.stopped, pieces


@pytest.mark.parametrize("stops", [("DEFGHIJ",), ("DEFG", "EF")])
def test_a_stop_over_several_tokens_shows_nothing_of_itself(stops: tuple[str, ...]) -> None:
    ids = [*byte_ids("ABCDEFGHIJK"), EOS]
    start = min("ABCDEFGHIJK".find(stop) for stop in stops)
    seen = set()
    for places in itertools.product([1, 2, 3, 6], repeat=3):
        shown, entries, count, stopped, _ = read(ids, list(places), stops)
        assert (shown, stopped) == ("ABCDEFGHIJK"[:start], True)
        assert b"".join(entry.raw for entry in entries).decode() == shown
        seen.add(count)
    assert len(seen) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_of_several_tokens_come_whole_with_one_entry_per_token(size: int) -> None:
    answer = "ď€🦙👩‍👩‍👧"
    ids = [*byte_ids(answer), EOS]
    shown, entries, count, _, pieces = read(ids, [size])
    assert shown == answer and count == len(ids) == len(entries)
    assert not any("\ufffd" in piece for piece in pieces)
    assert b"".join(entry.raw for entry in entries).decode() == answer
    assert [entry.logprob for entry in entries] == [-float(place) for place in range(len(ids))]


def test_the_token_that_ends_an_answer_is_no_text_but_counts() -> None:
    shown, _, count, _, _ = read([*byte_ids("ab"), EOS], [1])
    assert (shown, count) == ("ab", 3)


def test_a_stop_that_was_held_for_a_longer_one_counts_at_the_end() -> None:
    shown, _, _, stopped, _ = read(byte_ids("ABCDEF"), [1], ("DEFG", "EF"), finish="length")
    assert (shown, stopped) == ("ABCD", True)


def test_text_held_for_a_stop_that_never_comes_is_let_go_at_the_end() -> None:
    shown, _, _, stopped, pieces = read(byte_ids("ABDE"), [1], ("DEFG",), finish="length")
    assert (shown, stopped, pieces) == ("ABDE", False, ["A", "B", "", "DE"])


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.lists(st.integers(2, 330), min_size=1, max_size=20),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.sampled_from(["a", "th", "e ", "é", "\ufffd", "at"]), max_size=2),
)
def test_what_is_shown_does_not_depend_on_the_cut(ids: list[int], groups: list[int], stops: list[str]) -> None:
    whole = read(ids, [len(ids)], tuple(stops), finish="length")
    assert read(ids, groups, tuple(stops), finish="length")[:4] == whole[:4]
