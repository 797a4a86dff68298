from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import FileFormatError, RequestError
from rackserve.text.tokenizer import Tokenizer, pack, unpack
from tests.text.small_model import EOS, backend, small_tokenizer, write_folder


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
