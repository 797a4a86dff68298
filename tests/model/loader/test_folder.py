from __future__ import annotations

import json
from pathlib import Path

import pytest

from rackserve.base.errors import FileFormatError
from rackserve.model.loader.folder import weight_files


def test_one_file_or_its_shards_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).touch()
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(FileFormatError, match=r"a\.safetensors: shard .* missing"):
        weight_files(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"x": 3}}])
def test_an_index_without_a_map_is_refused(tmp_path: Path, index: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileFormatError, match="weight_map"):
        weight_files(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"neither model\.safetensors nor"):
        weight_files(tmp_path)
