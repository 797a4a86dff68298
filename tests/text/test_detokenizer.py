from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.text.detokenizer import Detokenizer
from tests.text.small_model import EOS, byte_ids, small_tokenizer


def pieces(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(small_tokenizer())
    return [detokenizer.feed(number) for number in ids] + [detokenizer.flush()]


def test_characters_of_several_tokens_come_out_whole() -> None:
    text = "ď€🦙👩‍👩‍👧"
    assert pieces(byte_ids(text)) == [text_of for c in text for text_of in [""] * (len(c.encode()) - 1) + [c]] + [""]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 330), max_size=30))
def test_joined_pieces_equal_the_full_decode_of_any_ids(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == small_tokenizer().decode(ids)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 330), max_size=20), st.integers(1, 5))
def test_tokens_fed_together_give_the_text_of_tokens_fed_one_by_one(ids: list[int], size: int) -> None:
    detokenizer = Detokenizer(small_tokenizer())
    text = [detokenizer.feed(*ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join([*text, detokenizer.flush()]) == "".join(pieces(ids))


def test_an_unfinished_character_shows_only_at_the_end() -> None:
    ids = [*byte_ids("ok"), *byte_ids("🦙".encode()[:3])]
    assert pieces(ids) == ["o", "k", "", "", "", "\ufffd"]


@pytest.mark.parametrize("noise", [b"\xff", b"\x80"])
def test_bytes_that_never_become_a_character_do_not_hold_up_the_text(noise: bytes) -> None:
    assert pieces([*byte_ids(noise), *byte_ids("a")]) == ["\ufffd", "a", ""]


def test_special_tokens_are_silent_even_inside_a_character() -> None:
    first, second = byte_ids("é")
    assert pieces([first, EOS, second]) == ["", "", "é", ""]
