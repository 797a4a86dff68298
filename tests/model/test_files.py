from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.model.files import GOLDEN_FOLDER, ModelFiles, kind_of, open_model
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


# ---------------------------------------------------------------- DeepSeek-V4.1


def deepseek_folder(folder: Path) -> Path:
    """The golden checkpoint's config beside weights nobody can read."""
    folder.mkdir()
    (folder / "config.json").write_bytes((GOLDEN_FOLDER / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(b"none")
    return folder


def test_the_golden_checkpoint_has_a_name_and_is_spoken_to_in_token_ids() -> None:
    files = open_model("golden")
    assert (files.name, files.path, files.tokenizer_path, files.chat_template) == ("golden", GOLDEN_FOLDER, None, "")
    assert (files.bos_id, files.eos_ids) == (0, (1,))
    assert (files.deepseek_v41.vocab_size, files.config.max_positions) == (512, 1024)
    assert len(files.revision) == 64


def test_away_from_the_repository_the_golden_checkpoint_is_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rackserve.model.files.GOLDEN_FOLDER", Path("/nowhere"))
    with pytest.raises(FileFormatError, match=r"^golden: comes with the repository, not with an installed package"):
        open_model("golden")
    assert kind_of("golden") == "llama"


def test_the_kind_of_a_model_is_told_by_its_config(folder: Path, tmp_path: Path) -> None:
    deepseek = deepseek_folder(tmp_path / "deepseek")
    kinds = [kind_of(name) for name in ("embedded", "golden", str(folder), str(deepseek), "no-such-model")]
    assert kinds == ["llama", "deepseek_v41", "llama", "deepseek_v41", "llama"]


def test_a_model_of_the_other_kind_is_refused_with_the_setting(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds a Llama model: set runner\.kind to llama"):
        _ = open_model(str(folder)).deepseek_v41
    with pytest.raises(ConfigError, match=r"holds a DeepSeek-V4\.1 model: set runner\.kind to deepseek_v41"):
        _ = open_model(str(deepseek_folder(tmp_path / "deepseek"))).llama


def test_a_tokenizer_in_the_folder_is_found(tmp_path: Path) -> None:
    folder = deepseek_folder(tmp_path / "deepseek")
    (folder / "tokenizer.json").write_text("{}")
    assert open_model(str(folder)).tokenizer_path == folder / "tokenizer.json"


def test_opening_a_model_reads_no_weights(folder: Path) -> None:
    files = open_model(str(folder))
    (folder / "model.safetensors").write_bytes(b"other")  # after opening: only asking for the revision looks at it
    before = files.revision
    (folder / "model.safetensors").write_bytes(b"again")
    assert files.revision != before


def test_the_embedded_model_reads_text_as_its_makers_do(smollm2: ModelFiles, golden: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.tokenizer_path))
    for prompt in golden.values():
        assert tokenizer.encode(prompt["text"], add_special_tokens=False).ids == prompt["ids"]
        assert tokenizer.decode(prompt["ids"], skip_special_tokens=False) == prompt["text"]
    assert (smollm2.name, smollm2.bos_id, smollm2.eos_ids) == ("smollm2-135m", 1, (2,))
    assert "<|im_start|>" in smollm2.chat_template
    assert smollm2.revision.startswith("b179c952")
