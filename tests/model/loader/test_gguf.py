from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from rackserve.base.errors import FileFormatError
from rackserve.model.config import read_config, read_json
from rackserve.model.files import open_model
from rackserve.model.loader.gguf import convert_gguf
from tests.model import tiny


def ignore(what: str, done: int, total: int) -> None:
    """No progress shown."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(tiny.write_gguf(folder / "source"), folder, ignore)
    return folder


def test_every_weight_comes_out_as_it_went_in(converted: Path) -> None:
    found, wanted = load_file(converted / "model.safetensors"), tiny.random_weights()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_the_folder_describes_the_model(converted: Path) -> None:
    config = read_config(converted / "config.json")
    assert config.norm_eps == pytest.approx(tiny.CONFIG.norm_eps)
    assert {**config.to_hf(), "rms_norm_eps": 0} == {**tiny.CONFIG.to_hf(), "rms_norm_eps": 0}
    files = open_model(str(converted))
    assert (files.bos_id, files.eos_ids, files.chat_template) == (1, (2,), tiny.TEMPLATE)
    assert read_json(converted / "tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_the_tokenizer_merges_keeps_digits_apart_and_knows_special_tokens(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    found = tokenizer.encode("hell<|im_end|>he ll\n12<tool>", add_special_tokens=False)
    assert found.tokens == ["hell", "<|im_end|>", "he", "Ġ", "ll", "Ċ", "1", "2", "<tool>"]
    assert tokenizer.decode(found.ids, skip_special_tokens=False) == "hell<|im_end|>he ll\n12<tool>"
    assert tokenizer.decode(found.ids) == "hellhe ll\n12<tool>"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": "qwen2"}, "general.architecture is 'qwen2'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"extra": "blk.0.ffn_gate_inp.weight"}, "tensor blk.0.ffn_gate_inp.weight belongs to no Llama"),
    ],
)
def test_another_kind_of_model_is_refused(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    path = tiny.write_gguf(tmp_path / "model.gguf", **changes)
    with pytest.raises(FileFormatError, match=words) as caught:
        convert_gguf(path, tmp_path, ignore)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.9])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    whole = tiny.write_gguf(tmp_path / "model.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(FileFormatError, match=r"cut\.gguf: not a readable GGUF file"):
        convert_gguf(path, tmp_path, ignore)
