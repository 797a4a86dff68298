from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import FileFormatError, RequestError
from rackserve.text.tokenizer import Piece, Tokenizer, pack, unpack
from tests.text.small_model import EOS, backend, small_tokenizer, write_folder

ADDED = ("<|im_start|>", "<|im_end|>", "<think>", "two words")


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_text_survives_the_way_to_ids_and_back(text: str) -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.decode(unpack(tokenizer.encode(text))) == text


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 330), max_size=30))
def test_decoding_any_ids_agrees_with_the_library(ids: list[int]) -> None:
    assert small_tokenizer().decode(ids) == backend().decode(ids, skip_special_tokens=True)


def test_tokens_travel_as_int32_little_endian() -> None:
    assert pack([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert unpack(pack([7, 0, 129_279])) == (7, 0, 129_279)


def test_markers_in_the_text_become_special_ids_that_decode_to_nothing() -> None:
    tokenizer = small_tokenizer()
    ids = unpack(tokenizer.encode("a<|im_end|>b"))
    assert ids[1] == tokenizer.token_id("<|im_end|>") and ids[1] in tokenizer.special_ids
    assert tokenizer.decode(ids) == "ab"


def test_vocabulary_size_covers_the_largest_id() -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.vocab_size == max(backend().get_vocab().values()) + 1
    assert tokenizer.piece(tokenizer.vocab_size) == b""


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        small_tokenizer().encode("a\ud800")


def test_a_folder_names_what_ends_an_answer(tmp_path: Path) -> None:
    write_folder(tmp_path)
    assert Tokenizer.from_folder(tmp_path).eos_ids == (EOS,)
    (tmp_path / "generation_config.json").write_bytes(msgspec.json.encode({"eos_token_id": [5, EOS]}))
    assert Tokenizer.from_folder(tmp_path).eos_ids == (5, EOS)


@pytest.mark.parametrize("content", [None, b"{", b'{"decoder": {"type": "Metaspace"}}', b'{"decoder": {"type": "ByteLevel"}}'])
def test_an_unusable_tokenizer_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_only_the_template_writes_special_tokens() -> None:
    tokenizer = small_tokenizer()
    start, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
    prompt = [Piece("<|im_start|>user\n", True), Piece("a<|im_end|>b<think>", False), Piece("<|im_end|>\n", True)]
    ids = unpack(tokenizer.encode_pieces(prompt))
    assert (ids.count(start), ids.count(end), ids.count(tokenizer.token_id("<think>"))) == (1, 1, 0)
    between = ids[ids.index(start) + 1 : ids.index(end)]
    assert tokenizer.decode(between) == "user\na<|im_end|>b<think>"


_words = st.sampled_from(["a", "the cat", "\n", "<", "<|im_", "end|>", "<|im_end|>", "<think>", "two words", "é", "1", " "])


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.builds(Piece, st.lists(_words, max_size=4).map("".join), st.booleans()), max_size=5))
def test_pieces_are_encoded_like_their_text_unless_a_client_writes_special_tokens(pieces: list[Piece]) -> None:
    tokenizer = small_tokenizer()
    marks = re.compile("|".join(map(re.escape, ADDED)))
    spans, text = [], ""
    for piece in pieces:
        spans += [(len(text) + m.start(), len(text) + m.end()) for m in marks.finditer(piece.text) if piece.ours]
        text += piece.text
    ids = unpack(tokenizer.encode_pieces(pieces))
    added = [number for number in ids if number in {tokenizer.token_id(token) for token in ADDED}]
    assert added == [tokenizer.token_id(text[start:end]) for start, end in spans]
    if [m.span() for m in marks.finditer(text)] == spans:
        assert ids == unpack(tokenizer.encode(text))
    spelt = {tokenizer.token_id(token): token.encode() for token in ADDED}
    assert b"".join(spelt.get(number) or tokenizer.piece(number) for number in ids).decode() == text


def test_a_prompt_of_pieces_that_is_no_text_is_refused() -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        small_tokenizer().encode_pieces([Piece("<think>", True), Piece("\ud800", False)])
