"""The released configuration and the tiny one are understood; contradictions are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rackserve.model.deepseek_v41 as package
from rackserve.base.errors import FileFormatError
from rackserve.model.deepseek_v41.config import read_config

FLASH = Path(package.__file__).parent / "flash.json"
TINY = Path(__file__).parents[2] / "golden" / "deepseek_v41_tiny" / "config.json"


def test_layers_read_the_latest_kv_source() -> None:
    config = read_config(FLASH)
    assert [config.kv_source(layer) for layer in (0, 1, 2, 7, 8, 13, 19, 20, 39)] == [-1, -1, 2, 2, 8, 8, 14, 20, 20]
    assert [config.has_gate(source) for source in config.kv_source_layer_ids] == [True, True, True, False]
    assert config.engram_columns == 24


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", None, "hidden_size"),
        ("hidden_size", "128", "hidden_size"),
        ("hidden_size", 100, "multiples of 32"),
        ("n_shared_experts", 2, "n_shared_experts"),
        ("scoring_func", "softmax", "scoring_func"),
        ("compress_ratios", [0] * 10, "compress_ratios has 10 entries"),
        ("compress_ratios", [0, 4, 4, 4, 1, 1, 1, 1, 0, 0, 0], "may hold"),
        ("kv_source_layer_ids", [4, 1], "rising"),
        ("index_source_layer_ids", [1, 6], "include every kv source"),
        ("candidate_topk_blocks", 1, "index_topk"),
        ("dspark_noise_token_id", 512, "vocabulary"),
        ("num_experts_per_tok", 9, "num_experts_per_tok"),
        ("vocab_size", 0, "vocab_size must be at least 1"),
        ("vocab_size", 10**15, "vocab_size is larger than any model's"),
        ("dspark_block_size", 1000, "dspark_block_size is larger than any model's, at most 64"),
        ("rms_norm_eps", -1.0, "rms_norm_eps must be a finite number above 0"),
        ("rope_theta", 0.0, "rope_theta must be a finite number above 0"),
        ("rope_scaling", {"factor": 0.0}, "factor must be a finite number above 0"),
    ],
)
def test_a_field_that_cannot_be_is_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    fields = json.loads(TINY.read_text())
    fields["text_config"] |= {field: value}
    if value is None:
        del fields["text_config"][field]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(FileFormatError, match=message):
        read_config(path)
