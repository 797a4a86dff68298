from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rackserve.base.errors import FileFormatError, ResourceError
from rackserve.model.llama import load_weights
from rackserve.model.loader.safetensors import TensorFiles
from tests.model import tiny


def test_shards_give_the_same_weights_as_one_file(tmp_path: Path) -> None:
    tensors = tiny.random_weights()
    names = sorted(tensors)
    shards = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    tiny.write_folder(tmp_path / "single")
    tiny.write_folder(tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / "sharded" / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    one, many = (load_weights(tmp_path / name, tiny.CONFIG) for name in ("single", "sharded"))
    assert torch.equal(one.embedding, many.embedding) and torch.equal(one.head, many.head)
    for ours, theirs in zip(one.layers, many.layers, strict=True):
        assert torch.equal(ours.qkv, theirs.qkv) and torch.equal(ours.down, theirs.down)


def test_a_missing_tensor_is_named_with_the_files_searched(tmp_path: Path) -> None:
    tensors = tiny.random_weights()
    del tensors["model.layers.1.mlp.down_proj.weight"]
    words = r"tensor model\.layers\.1\.mlp\.down_proj\.weight of shape \[32, 48\] is in none of model\.safetensors"
    with pytest.raises(FileFormatError, match=words):
        load_weights(tiny.write_folder(tmp_path, tensors), tiny.CONFIG)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = tiny.random_weights()
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(64, 32)
    words = r"model\.safetensors: tensor model\.layers\.0\.self_attn\.k_proj\.weight has shape \[64, 32\], .* \[32, 32\]"
    with pytest.raises(FileFormatError, match=words):
        load_weights(tiny.write_folder(tmp_path, tensors), tiny.CONFIG)


def test_a_format_that_cannot_be_computed_with_is_refused(tmp_path: Path) -> None:
    tensors = tiny.random_weights()
    tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)
    with pytest.raises(FileFormatError, match=r"model\.norm\.weight is torch\.int8"):
        load_weights(tiny.write_folder(tmp_path, tensors), tiny.CONFIG)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tiny.write_folder(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(FileFormatError, match=r"model\.safetensors: truncated"):
        load_weights(tmp_path, tiny.CONFIG)


def test_a_tensor_stays_valid_after_its_file_is_closed(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path)
    with TensorFiles(tmp_path) as files:
        norm = files.read("model.norm.weight", (32,))
    assert torch.equal(norm, tiny.random_weights()["model.norm.weight"])


def test_a_sound_file_that_cannot_be_mapped_is_no_bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_folder(tmp_path) / "model.safetensors"

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 538090408 bytes")

    monkeypatch.setattr("rackserve.model.loader.safetensors.safe_open", refused)
    words = rf"{path}: no {path.stat().st_size} bytes of address space to map it \(unable to mmap .*\); .*ulimit -v"
    with pytest.raises(ResourceError, match=words):
        load_weights(tmp_path, tiny.CONFIG)
