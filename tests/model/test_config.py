from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rackserve.base.errors import FileFormatError
from rackserve.model.config import read_config, read_json
from tests.model.tiny import CONFIG


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    fields = CONFIG.to_hf() | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value != "absent"}))
    return path


def test_a_config_written_is_the_config_read(tmp_path: Path) -> None:
    assert read_config(write(tmp_path)) == CONFIG


def test_absent_optional_fields_mean_what_the_format_says(tmp_path: Path) -> None:
    config = read_config(
        write(tmp_path, num_key_value_heads="absent", head_dim="absent", rope_theta="absent", hidden_act="absent")
    )
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10_000.0)


def test_null_is_absent(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("rope_theta", "num_key_value_heads", "head_dim"))
    config = read_config(write(tmp_path, **nothing, rope_parameters={"rope_theta": None}))
    assert (config.rope_theta, config.num_kv_heads, config.head_dim) == (10_000.0, 4, 8)


def test_the_longest_contexts_there_are_are_read(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, max_position_embeddings=2**22)).max_positions == 2**22


def test_the_newer_spelling_of_rope_is_read(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    assert read_config(write(tmp_path, rope_theta="absent", rope_parameters=rope)).rope_theta == 5000.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "absent"}, "field hidden_size is missing"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type is 'llama3'"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "multiple of kv heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1 and at most 1024, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        ({"num_attention_heads": 0, "head_dim": "absent"}, "num_attention_heads must be"),
        ({"num_attention_heads": "4", "head_dim": "absent"}, "num_attention_heads must be"),
        ({"hidden_size": 2, "head_dim": "absent"}, "heads of 0|kv heads of 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings must be"),
        ({"head_dim": 2**70}, "head_dim must be"),
        ({"rope_theta": [1]}, "rope_theta"),
        *[
            ({name: value}, rf"{name} must be a number from 1e-37 to 3.4e\+38, got {str(value)[:3]}")
            for name in ("rms_norm_eps", "rope_theta")
            for value in (-1.0, 0, 0.0, math.inf, -math.inf, math.nan, 1e-60, 1e60, 10**400, True)
        ],
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a number from .*, got 0"),
        ({"rope_parameters": {"rope_theta": -5000.0}}, "rope_theta must be a number from .*, got -5000"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings must be .* at most 4194304, got 1000000000"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers must be .* at most 1024, got 1025"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be"),
        ({"head_dim": 0}, "head_dim must be"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rope_scaling": [1]}, "rope_parameters must be an object"),
    ],
)
def test_a_config_that_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(FileFormatError, match=words) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), (b"{", "not valid JSON"), (b"[1]", "JSON list"), (b"[" * 100_000, "not valid JSON")],
)
def test_a_json_file_that_is_none_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileFormatError, match=words):
        read_json(path)
