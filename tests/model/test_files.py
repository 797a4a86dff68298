from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rackserve.base.errors import FileFormatError
from rackserve.model.files import ModelFiles, open_model
from tests.model import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_folder(tmp_path / "some-model")


def test_a_folder_is_opened_with_all_its_facts(folder: Path) -> None:
    files = open_model(str(folder))
    assert (files.name, files.path, files.config) == ("some-model", folder, tiny.CONFIG)
    assert (files.tokenizer_path, files.chat_template, files.bos_id, files.eos_ids) == (folder / "tokenizer.json", "", 1, (2,))


def test_the_revision_changes_with_weights_and_config_but_not_with_the_place(folder: Path, tmp_path: Path) -> None:
    first = open_model(str(folder)).revision
    assert open_model(str(tiny.write_folder(tmp_path / "copy"))).revision == first
    assert open_model(str(tiny.write_folder(tmp_path / "other", tiny.random_weights(seed=1)))).revision != first
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG.to_hf() | {"rope_theta": 5.0}))
    assert open_model(str(folder)).revision != first


@pytest.mark.parametrize(
    ("name", "content", "template"),
    [
        ("chat_template.jinja", "A", "A"),
        ("tokenizer_config.json", json.dumps({"chat_template": "B"}), "B"),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "x"}, {"name": "default", "template": "C"}]}), "C"),
        ("tokenizer_config.json", json.dumps({}), ""),
    ],
)
def test_the_chat_template_is_found_wherever_folders_keep_it(folder: Path, name: str, content: str, template: str) -> None:
    (folder / name).write_text(content)
    assert open_model(str(folder)).chat_template == template


@pytest.mark.parametrize(("generation", "eos"), [({"eos_token_id": [2, 7]}, (2, 7)), ({"eos_token_id": 5}, (5,)), ({}, (2,))])
def test_the_generation_config_names_the_end_tokens_if_it_can(
    folder: Path, generation: dict[str, Any], eos: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert open_model(str(folder)).eos_ids == eos


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FileFormatError, match=name):
        open_model(str(folder))


def test_a_model_that_does_not_exist_is_answered_with_what_does() -> None:
    with pytest.raises(FileFormatError, match=r"no-such-model: no such folder; .* embedded or smollm2-135m or golden"):
        open_model("no-such-model")


def test_the_embedded_model_reads_text_as_its_makers_do(smollm2: ModelFiles, golden: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.tokenizer_path))
    for prompt in golden.values():
        assert tokenizer.encode(prompt["text"], add_special_tokens=False).ids == prompt["ids"]
        assert tokenizer.decode(prompt["ids"], skip_special_tokens=False) == prompt["text"]
    assert (smollm2.name, smollm2.bos_id, smollm2.eos_ids) == ("smollm2-135m", 1, (2,))
    assert "<|im_start|>" in smollm2.chat_template
    assert smollm2.revision.startswith("b179c952")
