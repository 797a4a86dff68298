from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rackserve.base.errors import FileFormatError
from rackserve.model.loader.blocks import BLOCKS_FILE, Blocks


def test_matrices_are_found_together_and_in_one_kind_or_not_at_all(tmp_path: Path) -> None:
    one, other = np.ones((2, 1, 20), np.uint8), np.zeros((3, 1, 20), np.uint8)
    save_file({"a.b.q4_1": one, "c.q4_1": other, "d.q8_0": np.zeros((1, 1, 34), np.uint8)}, str(tmp_path / BLOCKS_FILE))
    blocks = Blocks(tmp_path)
    found = blocks.find(["a.b", "c"])
    assert found is not None and found[0] == "q4_1" and np.array_equal(found[1][0], one) and np.array_equal(found[1][1], other)
    assert blocks.find(["a.b", "d"]) is None and blocks.find(["a.b", "x"]) is None


def test_a_folder_without_blocks_has_none(tmp_path: Path) -> None:
    assert Blocks(tmp_path).find(["a"]) is None


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / BLOCKS_FILE).write_bytes(b"\x08" * 30)
    with pytest.raises(FileFormatError, match=BLOCKS_FILE):
        Blocks(tmp_path)
