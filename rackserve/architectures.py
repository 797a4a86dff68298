"""Models for the cost model: those of its data files, and DeepSeek-V4.1 from its own `config.json`, counted, not copied."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from rackserve.base.errors import ConfigError
from rackserve.model import deepseek_v41
from rackserve.model.deepseek_v41.config import DeepseekV41Config, read_config
from rackserve.model.deepseek_v41.inventory import TensorSpec, inventory
from rackserve.model.deepseek_v41.layout import index_row_bytes, kv_layout, main_row_bytes, window_row_bytes
from rackserve.model.deepseek_v41.memory import part_of
from rackserve.sim.cost.architecture import (
    Architecture,
    Attention,
    Draft,
    Experts,
    Indexer,
    Segment,
    Weights,
    plain_architectures,
)

FLASH = "deepseek-v4.1-flash"
"""The released model, whose config.json is part of the package."""

PRODUCTS = 6
"""Products of a layer besides its experts: queries down and up, rows, output down and up, router."""

BLOCK_TOKENS = 256


def architecture_names() -> list[str]:
    """What `architecture_named` knows."""
    return [FLASH, *plain_architectures()]


@cache
def architecture_named(name: str) -> Architecture:
    """A model by name. ConfigError that lists all of them if there is none."""
    if name == FLASH:
        return v41_architecture(read_config(Path(deepseek_v41.__file__).with_name("flash.json")), FLASH)
    plain = plain_architectures()
    if name not in plain:
        raise ConfigError(f"--model {name[:40]!r} is unknown; choose one of {', '.join(architecture_names())}")
    return plain[name]


def v41_architecture(config: DeepseekV41Config, name: str) -> Architecture:
    """The model as its checkpoint is laid out: early positions of a prompt pass the layers before the last KV source alone."""
    tensors = inventory(config)
    layout = kv_layout(config, BLOCK_TOKENS)
    boundary = config.first_decoder_layer
    stages = config.num_nextn_predict_layers
    draft = _segment(config, tensors, "draft", range(config.num_hidden_layers, config.num_hidden_layers + stages))
    tables = [spec for spec in tensors.values() if spec.table]
    table_rows = sum(spec.num_bytes / spec.shape[0] for spec in tables)
    return Architecture(
        name=name,
        source="its config.json and the list of its tensors",
        math="fp8",
        hidden_size=config.hidden_size,
        segments=(
            _segment(config, tensors, "encoder", range(boundary)),
            _segment(config, tensors, "decoder", range(boundary, config.num_hidden_layers)),
        ),
        head=_weights([tensors["head.weight"]]),
        embedding=_weights([tensors["embed.weight"]]),
        kv_bytes=layout.block_bytes / layout.block_tokens,
        state_bytes=layout.window_bytes,
        table_bytes=sum(spec.num_bytes for spec in tables),
        table_row_bytes=config.engram_columns * table_rows,
        draft=Draft(draft, config.dspark_block_size),
    )


def _segment(config: DeepseekV41Config, tensors: dict[str, TensorSpec], name: str, layers: range) -> Segment:
    """`layers` in front of, or from, the last KV source, whose compressor works for all positions and counts to the former."""
    drafting, stages = name == "draft", config.num_hidden_layers
    dense, shared, expert = [], [], []
    for tensor, spec in tensors.items():
        if _segment_of(config, tensor) != name or spec.table:
            continue
        if ".shared_experts." in tensor:
            shared.append(spec)
        elif part_of(tensor) == "routed experts" or ".ffn.experts." in tensor:
            expert.append(spec)
        else:
            dense.append(spec)
    num = config.dspark_n_routed_experts if drafting else config.n_routed_experts
    each = _weights(expert)
    count = len(layers) * num
    return Segment(
        name=name,
        num_layers=len(layers),
        dense=_weights(dense),
        shared=_weights(shared),
        experts=Experts(
            num,
            config.dspark_num_experts_per_tok if drafting else config.num_experts_per_tok,
            each.parameters / count,
            each.cut_bytes / count,
            "fp8",
        ),
        attention=_attention(config, layers),
        indexers=tuple(_indexers(config, [layer for layer in layers if layer < stages])),
        products=PRODUCTS,
        tail_only=name == "decoder",
        stream_bytes=2 * 2 * (2 * config.hc_mult + 2) * config.hidden_size,  # two boundaries: streams in and out, bf16
    )


def _segment_of(config: DeepseekV41Config, tensor: str) -> str:
    """Which segment a tensor counts to; empty for embedding, head and final norm."""
    if tensor.startswith("mtp."):
        return "draft"
    if not tensor.startswith("layers."):
        return ""
    early = int(tensor.split(".")[1]) < config.first_decoder_layer or ".compressor." in tensor or ".indexer.wk." in tensor
    return "encoder" if early else "decoder"


def _weights(specs: list[TensorSpec]) -> Weights:
    cut = [spec for spec in specs if spec.cut != "whole"]
    whole = sum(spec.num_bytes for spec in specs) - sum(spec.num_bytes for spec in cut)
    return Weights(sum(spec.num_parameters for spec in specs), sum(spec.num_bytes for spec in cut), whole)


def _attention(config: DeepseekV41Config, layers: range) -> tuple[Attention, ...]:
    """One entry per ratio: 0 reads the window alone."""
    return tuple(
        Attention(
            num_layers=sum(config.compress_ratios[layer] == ratio for layer in layers),
            pair_flops=4 * config.num_attention_heads * config.head_dim,
            row_bytes=main_row_bytes(config) if ratio else 0,
            kv_heads=1,
            ratio=max(ratio, 1),
            limit=config.index_topk if ratio else 0,
            window=config.sliding_window,
            window_row_bytes=window_row_bytes(config),
        )
        for ratio in sorted({config.compress_ratios[layer] for layer in layers})
    )


def _indexers(config: DeepseekV41Config, layers: list[int]) -> list[Indexer]:
    """Sources that score all rows, and later ones that score the candidates of the last source."""
    kinds: dict[tuple[int, int], int] = {}
    for layer in config.index_source_layer_ids:
        if layer in layers:
            again = layer > config.candidate_source_layer_id
            limit = config.candidate_topk_blocks * config.candidate_block_size if again else 0
            key = (config.compress_ratios[layer], limit)
            kinds[key] = kinds.get(key, 0) + 1
    pair = 2 * config.index_n_heads * config.index_head_dim
    return [Indexer(count, pair, index_row_bytes(config), ratio, limit) for (ratio, limit), count in kinds.items()]
