from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import RequestError
from rackserve.text.detokenizer import Detokenizer
from rackserve.text.numbers import NumberTokenizer
from rackserve.text.tokenizer import Piece, unpack

SIZE = 1000
TOKENIZER = NumberTokenizer(SIZE, (1,))


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.integers(0, SIZE - 1), max_size=20), st.integers(0, 20))
def test_ids_survive_the_way_to_text_and_back_in_any_parts(ids: list[int], cut: int) -> None:
    text = TOKENIZER.decode(ids[:cut]) + TOKENIZER.decode(ids[cut:])
    assert list(unpack(TOKENIZER.encode(text))) == ids


def test_text_is_the_same_token_by_token() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.feed(number) for number in (7, 12, 999)] == ["7 ", "12 ", "999 "]


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_white_space_alone_is_no_tokens(text: str) -> None:
    assert TOKENIZER.encode(text, specials=True) == b""


@pytest.mark.parametrize("word", ["1000", "-1", "+1", "07", "1_0", "٣", "1.0", "hello", "9" * 5000])
def test_words_that_are_no_ids_are_refused_by_name(word: str) -> None:
    with pytest.raises(RequestError, match=r"word 1 .*from 0 to 999"):
        TOKENIZER.encode(f"3 {word} 4")


def test_tokens_are_known_by_their_spelling() -> None:
    assert (TOKENIZER.token_id("12"), TOKENIZER.token_id("1000"), TOKENIZER.token_id("<eos>")) == (12, None, None)
    assert (TOKENIZER.piece(1), TOKENIZER.piece(SIZE), TOKENIZER.piece(-1)) == (b"1 ", b"", b"")


def test_it_says_what_a_tokenizer_says() -> None:
    assert (TOKENIZER.vocab_size, TOKENIZER.special_ids, TOKENIZER.eos_ids) == (SIZE, frozenset(), (1,))
    assert unpack(TOKENIZER.encode_pieces([Piece("1 2", True), Piece(" 3", False)])) == (1, 2, 3)
