from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rackserve.base.errors import FileFormatError
from rackserve.model.loader.blocks import BLOCKS_FILE, Blocks

ONE, OTHER = np.ones((2, 1, 20), np.uint8), np.zeros((3, 1, 20), np.uint8)
EIGHT = np.zeros((1, 1, 34), np.uint8)


def blocks_of(folder: Path, **tensors: np.ndarray) -> Blocks:
    save_file(tensors, str(folder / BLOCKS_FILE))
    return Blocks(folder)


def test_matrices_are_found_together_or_not_at_all(tmp_path: Path) -> None:
    blocks = blocks_of(tmp_path, **{"a.b.q4_1": ONE, "c.q4_1": OTHER})
    found = blocks.find([("a.b", 2), ("c", 3)], 32)
    assert found is not None and found[0] == "q4_1" and np.array_equal(found[1][0], ONE) and np.array_equal(found[1][1], OTHER)
    assert blocks.find([("a.b", 2), ("x", 2)], 32) is None


def test_a_folder_without_blocks_has_none(tmp_path: Path) -> None:
    assert Blocks(tmp_path).find([("a", 1)], 32) is None


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / BLOCKS_FILE).write_bytes(b"\x08" * 30)
    with pytest.raises(FileFormatError, match=BLOCKS_FILE):
        Blocks(tmp_path)


@pytest.mark.parametrize(
    ("parts", "inner", "wanted"),
    [
        ([("a", 1)], 32, r"tensor a\.q4_1 has shape \[2, 1, 20\], 2 x 32 numbers, config\.json asks for 1 x 32"),
        ([("a", 3)], 32, r"asks for 3 x 32"),
        ([("a", 2)], 64, r"asks for 2 x 64"),
        ([("a", 2)], 40, r"asks for 2 x 40"),
        ([("a", 2), ("c", 2)], 32, r"tensor c\.q4_1 has shape \[3, 1, 20\].* asks for 2 x 32"),
        ([("a", 3), ("c", 2)], 32, r"tensor a\.q4_1"),  # right in the sum alone
    ],
)
def test_blocks_have_the_shape_that_the_configuration_asks_for(
    tmp_path: Path, parts: list[tuple[str, int]], inner: int, wanted: str
) -> None:
    blocks = blocks_of(tmp_path, **{"a.q4_1": ONE, "c.q4_1": OTHER})
    with pytest.raises(FileFormatError, match=rf"^{tmp_path / BLOCKS_FILE}: .*{wanted}"):
        blocks.find(parts, inner)


def test_matrices_multiplied_together_are_of_one_kind(tmp_path: Path) -> None:
    blocks = blocks_of(tmp_path, **{"a.q4_1": ONE, "d.q8_0": EIGHT})
    with pytest.raises(FileFormatError, match=r"of one kind, but a is q4_1, d is q8_0; remove"):
        blocks.find([("a", 2), ("d", 1)], 32)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("a.q5_0", np.ones((2, 1, 22), np.uint8), r"tensor a\.q5_0 is of kind 'q5_0', known are q4_1, q8_0"),
        ("a", ONE, "is of kind 'a'"),
        ("a.q4_1", np.ones((2, 1, 19), np.uint8), r"is U8 \[2, 1, 19\], wanted is U8 \[rows, groups, 20\]"),
        ("a.q8_0", ONE, r"wanted is U8 \[rows, groups, 34\]"),
        ("a.q4_1", ONE.astype(np.int8), r"is I8 \[2, 1, 20\]"),
        ("a.q4_1", ONE.astype(np.float32), r"is F32 \[2, 1, 20\]"),
        ("a.q4_1", ONE[0], r"is U8 \[1, 20\]"),
        ("b.q8_0", EIGHT, r"is there as q8_0, too|is there as q4_1, too"),
    ],
)
def test_what_is_no_matrix_of_blocks_is_named(tmp_path: Path, name: str, tensor: np.ndarray, words: str) -> None:
    with pytest.raises(FileFormatError, match=words):
        blocks_of(tmp_path, **{"b.q4_1": ONE, name: tensor})
