"""A loaded DeepSeek-V4.1 model as the native kernels want it: the checkpoint's own numbers, packed once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rackserve.base.errors import ConfigError
from rackserve.kernels.cpu import v41, v41_packing
from rackserve.kernels.cpu.library import Floats
from rackserve.kernels.cpu.v41_packing import Packed
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.inventory import TILE
from rackserve.model.deepseek_v41.layout import index_row_bytes, main_row_bytes
from rackserve.model.deepseek_v41.rotation import frequencies
from rackserve.model.deepseek_v41.weights import Matrix, Weights

LANES = 16


def make_plan(
    config: DeepseekV41Config, weights: Weights, block_tokens: int, *, round_inputs: bool, devices: int = 1
) -> v41.Plan:
    """Everything packed; `weights` must be held as stored. ConfigError for sizes that the kernels do not know.

    devices  tensor-parallel devices that hold a share of `weights` each
    """
    _check(config, devices)
    offsets, at = {}, 0
    for source in config.kv_source_layer_ids:
        rows = block_tokens // config.compress_ratios[source]
        offsets[source] = at, at + rows * main_row_bytes(config)
        at += rows * (main_row_bytes(config) + index_row_bytes(config))
    return v41.Plan(
        sizes=_sizes(config, block_tokens, devices, round_inputs=round_inputs),
        layers=tuple(_layer(config, weights, layer) for layer in range(config.num_hidden_layers)),
        compressors=tuple(_compressor(weights, source, *offsets[source]) for source in config.kv_source_layer_ids),
        indexers=tuple(_indexer(weights, layer) for layer in config.index_source_layer_ids),
        engrams=tuple(_engram(weights, f"layers.{layer}.engram") for layer in config.engram_layer_ids),
        stages=tuple(
            _block(config, weights, f"mtp.{stage}", config.dspark_num_experts_per_tok)
            for stage in range(config.num_nextn_predict_layers)
        ),
        draft=_draft(config, weights),
        head=packed(weights.matrix("head")),
        embed=_bits(weights.table("embed")),
        norm=_floats(weights.vector("norm")),
        freqs=_floats(frequencies(config, compressed=False)),
        compressed_freqs=_floats(frequencies(config, compressed=True)),
    )


def packed(matrix: Matrix) -> Packed:
    """A matrix for the kernels, in the checkpoint's own format where they read it well, else wider; nothing is rounded."""
    stored = matrix.stored
    weight, scale = stored.weight, stored.scale
    if scale is None:
        return (
            v41_packing.pack_bf16(_bits(weight)) if weight.dtype == torch.bfloat16 else v41_packing.pack_float(_floats(weight))
        )
    codes, exponents = _bytes(weight), _bytes(scale)
    found = (v41_packing.pack_fp4 if weight.dtype == torch.int8 else v41_packing.pack_fp8)(codes, exponents)
    if found is not None:
        return found
    wide = stored.widen()
    half = wide.to(torch.bfloat16)
    if torch.equal(half.float(), wide):
        return v41_packing.pack_bf16(_bits(half), quantised=True)
    return v41_packing.pack_float(_floats(wide), quantised=True)


def _check(config: DeepseekV41Config, devices: int) -> None:
    part = f", on each of {devices} devices" if devices > 1 else ""
    low = config.o_groups * config.o_lora_rank
    rules = {
        f"hc_mult is {config.hc_mult}, the kernels know {v41.MAX_STREAMS}": config.hc_mult == v41.MAX_STREAMS,
        f"vocab_size is {config.vocab_size}, the kernels want a multiple of {LANES}{part}": (
            config.vocab_size % (devices * LANES) == 0
        ),
        f"the channels after attention's groups are {low}, the kernels want a multiple of {TILE}{part}": (
            low % (devices * TILE) == 0
        ),
        f"dspark_markov_rank is {config.dspark_markov_rank}, the kernels want a multiple of {LANES}": (
            config.dspark_markov_rank % LANES == 0
        ),
    }
    problem = next((text for text, holds in rules.items() if not holds), "")
    if problem:
        raise ConfigError(f"{problem}; set runner.kernels to torch")


def _sizes(config: DeepseekV41Config, block_tokens: int, devices: int, *, round_inputs: bool) -> dict[str, int | float]:
    return {
        "vocab": config.vocab_size, "hidden": config.hidden_size, "layers": config.num_hidden_layers,
        "stages": config.num_nextn_predict_layers, "heads": config.num_attention_heads // devices, "head_dim": config.head_dim,
        "pairs": config.qk_rope_head_dim // 2, "q_rank": config.q_lora_rank, "o_groups": config.o_groups // devices,
        "o_rank": config.o_lora_rank, "inner": config.moe_intermediate_size // devices, "window": config.sliding_window,
        "index_heads": config.index_n_heads, "index_dim": config.index_head_dim, "topk": config.index_topk,
        "candidate_blocks": config.candidate_topk_blocks, "candidate_size": config.candidate_block_size,
        "first_decoder": config.first_decoder_layer, "engrams": len(config.engram_layer_ids),
        "engram_inputs": config.engram_columns * config.engram_head_dim, "targets": len(config.dspark_target_layer_ids),
        "block_size": config.dspark_block_size, "noise": config.dspark_noise_token_id,
        "markov_rank": config.dspark_markov_rank, "iterations": config.hc_sinkhorn_iters, "block_tokens": block_tokens,
        "round_inputs": round_inputs, "hc_eps": config.hc_eps, "norm_eps": config.rms_norm_eps,
        "swiglu_limit": config.swiglu_limit, "routed_scale": config.routed_scaling_factor,
    }  # fmt: skip


def _layer(config: DeepseekV41Config, weights: Weights, layer: int) -> v41.Layer:
    def number(ids: tuple[int, ...], wanted: int) -> int:
        return ids.index(wanted) if wanted in ids else -1

    gated = tuple(source for source in config.kv_source_layer_ids if config.has_gate(source))
    return v41.Layer(
        block=_block(config, weights, f"layers.{layer}", config.num_experts_per_tok),
        ratio=config.compress_ratios[layer],
        source=number(config.kv_source_layer_ids, config.kv_source(layer)),
        compressor=number(config.kv_source_layer_ids, layer),
        indexer=number(config.index_source_layer_ids, layer),
        engram=number(config.engram_layer_ids, layer),
        target=number(config.dspark_target_layer_ids, layer),
        open=number(gated, layer),
        is_candidate_source=layer == config.candidate_source_layer_id,
    )


def _block(config: DeepseekV41Config, weights: Weights, name: str, top: int) -> v41.Block:
    attn, ffn = f"{name}.attn", f"{name}.ffn"
    bias = _floats(weights.vector(f"{ffn}.gate.bias"))
    return v41.Block(
        attn_mixer=_mixer(config, weights, f"{name}.hc_attn"),
        ffn_mixer=_mixer(config, weights, f"{name}.hc_ffn"),
        wq_a=packed(weights.matrix(f"{attn}.wq_a")),
        wq_b=packed(weights.matrix(f"{attn}.wq_b")),
        wkv=packed(weights.matrix(f"{attn}.wkv")),
        wo_a=packed(weights.matrix(f"{attn}.wo_a")),
        wo_b=packed(weights.matrix(f"{attn}.wo_b")),
        gate=packed(weights.matrix(f"{ffn}.gate")),
        attn_norm=_floats(weights.vector(f"{name}.attn_norm")),
        ffn_norm=_floats(weights.vector(f"{name}.ffn_norm")),
        q_norm=_floats(weights.vector(f"{attn}.q_norm")),
        kv_norm=_floats(weights.vector(f"{attn}.kv_norm")),
        sink=_floats(weights.vector(f"{attn}.attn_sink")),
        bias=bias,
        experts=tuple(
            v41.Expert(*(packed(weights.matrix(f"{expert}.{part}")) for part in ("w1", "w2", "w3")))
            for expert in (*(f"{ffn}.experts.{number}" for number in range(len(bias))), f"{ffn}.shared_experts")
        ),
        top=top,
    )


def _mixer(config: DeepseekV41Config, weights: Weights, name: str) -> v41.Mixer:
    n = config.hc_mult
    scale = weights.vector(f"{name}_scale").repeat_interleave(torch.tensor([n, n, n * n]))
    fn = v41_packing.pack_float(_floats(weights.vector(f"{name}_fn")))
    return v41.Mixer(fn, _floats(scale), _floats(weights.vector(f"{name}_base")))


def _compressor(weights: Weights, source: int, main: int, index: int) -> v41.Compressor:
    name = f"layers.{source}.attn"
    gate = f"{name}.compressor.wgate"
    return v41.Compressor(
        wkv=packed(weights.matrix(f"{name}.compressor.wkv")),
        gate=packed(weights.matrix(gate)) if weights.has(gate) else None,
        wk=packed(weights.matrix(f"{name}.indexer.wk")),
        norm=_floats(weights.vector(f"{name}.compressor.norm")),
        k_norm=_floats(weights.vector(f"{name}.indexer.k_norm")),
        main=main,
        index=index,
    )


def _indexer(weights: Weights, layer: int) -> v41.Indexer:
    name = f"layers.{layer}.attn.indexer"
    return v41.Indexer(packed(weights.matrix(f"{name}.wq_b")), packed(weights.matrix(f"{name}.weights_proj")))


def _engram(weights: Weights, name: str) -> v41.Engram:
    weight = weights.vector(f"{name}.q_weight") * weights.vector(f"{name}.k_weight")
    return v41.Engram(packed(weights.matrix(f"{name}.wkv")), _floats(weight))


def _draft(config: DeepseekV41Config, weights: Weights) -> v41.Draft:
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    return v41.Draft(
        main=packed(weights.matrix("mtp.0.main_proj")),
        markov=packed(weights.matrix(f"{last}.markov_head.head")),
        main_norm=_floats(weights.vector("mtp.0.main_norm")),
        norm=_floats(weights.vector(f"{last}.norm")),
        confidence=_floats(weights.matrix(f"{last}.confidence_head.proj").stored.widen()[0]),
        embed=_bits(weights.table(f"{last}.markov_head.embed")),
    )


def _floats(x: Tensor) -> Floats:
    found: Floats = x.detach().to(torch.float32).contiguous().numpy()
    return found


def _bits(x: Tensor) -> NDArray[np.uint16]:
    """bf16 numbers as bits."""
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


def _bytes(x: Tensor) -> NDArray[np.uint8]:
    return x.contiguous().view(torch.uint8).numpy()
