"""Bytes of the cached state of a DeepSeek-V4.1 model, per row, block and boundary. No tensor is touched: no torch needed."""

from __future__ import annotations

from typing import Literal

from rackserve.base.errors import ConfigError
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.model.deepseek_v41.config import DeepseekV41Config

ResumeMode = Literal["exact", "bounded_replay", "decoder_replay"]

RESUME_MODES: tuple[ResumeMode, ...] = ("exact", "bounded_replay", "decoder_replay")


def main_row_bytes(config: DeepseekV41Config) -> int:
    """A compressed row: e2m1 channels two to a byte, then one e4m3 scale per 16."""
    return config.head_dim // 2 + config.head_dim // 16


def index_row_bytes(config: DeepseekV41Config) -> int:
    """An index key: e2m1 channels two to a byte, then one e8m0 scale per 32."""
    return config.index_head_dim // 2 + config.index_head_dim // 32


def window_row_bytes(config: DeepseekV41Config) -> int:
    """A window row: e4m3 channels, then one e8m0 scale per 32."""
    return config.head_dim + config.head_dim // 32


def engram_row_bytes(config: DeepseekV41Config) -> int:
    """A row of an Engram table: e4m3 channels, then one e8m0 scale per 32."""
    return config.engram_head_dim + config.engram_head_dim // 32


def open_group_bytes(config: DeepseekV41Config) -> int:
    """One pending token of a ratio-2 compressor: its kv and gate, float32."""
    return 2 * 4 * config.head_dim


def kv_layout(config: DeepseekV41Config, block_tokens: int, resume: ResumeMode = "exact") -> KvLayout:
    """KV groups for blocks of `block_tokens` positions. ConfigError if no block may end there or `resume` is unknown.

    full groups, in this order: for every KV source its main rows, then its index rows. window groups: the windows of all
    layers, those of the DSpark stages (the oldest row first, position % window), and the open group of each ratio-2 source.
    """
    if resume not in RESUME_MODES:
        raise ConfigError(f"runner.resume must be one of {', '.join(RESUME_MODES)}, got {resume!r}")
    if block_tokens % 2:
        raise ConfigError(
            f"runner.block_tokens is {block_tokens}: no block of this model may cut a group of 2 tokens; make it even"
        )
    groups: list[KvGroup] = []
    for source in config.kv_source_layer_ids:
        rows = block_tokens // config.compress_ratios[source]
        groups.append(KvGroup(f"main.{source}", "full", rows * main_row_bytes(config)))
        groups.append(KvGroup(f"index.{source}", "full", rows * index_row_bytes(config)))
    window = config.sliding_window * window_row_bytes(config)
    groups.append(KvGroup("windows", "window", config.num_hidden_layers * window))
    groups.append(KvGroup("dspark_windows", "window", config.num_nextn_predict_layers * window))
    gated = sum(config.has_gate(source) for source in config.kv_source_layer_ids)
    groups.append(KvGroup("open_groups", "window", gated * open_group_bytes(config)))
    return KvLayout(
        block_tokens,
        tuple(group for group in groups if group.bytes_per_slot),
        history_tokens=config.engram_max_ngram_size - 1,
        replay_tokens=0 if resume == "exact" else config.sliding_window,
        tail_tokens=config.sliding_window if resume == "decoder_replay" else 0,
    )
