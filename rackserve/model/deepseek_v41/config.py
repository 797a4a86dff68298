"""The shape of a DeepSeek-V4.1 text model, read from its `config.json`. No tensor is touched, so this needs no torch."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.model.config import read_json

MODEL_TYPE = "deepseek_v41"

FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
"""Fields of which one value alone is supported (and assumed where the field is absent)."""


MAX_SIZE = 2**31 - 1

LARGEST = {
    "num_hidden_layers": 1024,
    "n_routed_experts": 65_536,
    "dspark_n_routed_experts": 65_536,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
    "engram_max_ngram_size": 16,
    "dspark_block_size": 64,
}
"""Beyond these a file is damaged: work or tables would grow without end."""


class Yarn(msgspec.Struct, frozen=True):
    """How rotation frequencies are stretched for long contexts (YaRN, arXiv 2309.00071); no attention temperature."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


class DeepseekV41Config(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and roles, under the names of the released `text_config`.

    compress_ratios[l] is the ratio at which the KV that layer l reads was compressed (0: the layer reads its window alone);
    its last `num_nextn_predict_layers` entries are those of the DSpark stages.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: Yarn
    max_position_embeddings: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    @property
    def max_positions(self) -> int:
        return self.max_position_embeddings

    @property
    def engram_columns(self) -> int:
        """Rows read per token and table: n-gram orders 2 and up times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def first_decoder_layer(self) -> int:
        """Layers from here on read global KV that depends on the layers before it alone (ratio 1 has one source)."""
        return self.candidate_source_layer_id

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed KV `layer` reads; -1 if it reads its window alone."""
        if not self.compress_ratios[layer]:
            return -1
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def has_gate(self, source: int) -> bool:
        """Whether the compressor of KV source `source` joins two tokens by learned weights."""
        return self.compress_ratios[source] == 2


def read_config(path: Path) -> DeepseekV41Config:
    """The model described by `config.json` at `path`. FileFormatError names the field that is missing or not supported."""
    fields = read_json(path)
    if fields.get("model_type") != MODEL_TYPE:
        raise FileFormatError(f"{path}: model_type is {fields.get('model_type')!r}, not {MODEL_TYPE!r}; name another model")
    text = fields.get("text_config")
    if not isinstance(text, dict):
        raise FileFormatError(f"{path}: text_config must be an object, got {text!r:.40}; fetch the file again")
    for name, wanted in FIXED.items():
        if text.get(name, wanted) != wanted:
            raise FileFormatError(f"{path}: text_config.{name} is {text[name]!r}, only {wanted!r} is supported")
    try:
        config = msgspec.convert(text, DeepseekV41Config)
    except msgspec.ValidationError as error:
        raise FileFormatError(f"{path}: text_config: {error}; fetch the file again") from error
    problem = _problem(config)
    if problem:
        raise FileFormatError(f"{path}: text_config: {problem}; fetch the file again")
    return config


def _problem(config: DeepseekV41Config) -> str:
    """What makes the fields contradict each other, empty if nothing does."""
    layers, ratios = config.num_hidden_layers, config.compress_ratios
    sizes = {name: value for name in config.__struct_fields__ if isinstance(value := getattr(config, name), int)}
    small = next((name for name, value in sizes.items() if value < (0 if name.endswith("_id") else 1)), None)
    large = next((name for name, value in sizes.items() if value > LARGEST.get(name, MAX_SIZE)), None)
    floats = {name: value for part in (config, config.rope_scaling) for name in part.__struct_fields__
              if isinstance(value := getattr(part, name), float)}  # fmt: skip
    odd = next((name for name, value in floats.items() if not 0 < value < math.inf), None)
    sources, indexers = config.kv_source_layer_ids, config.index_source_layer_ids
    chosen = config.candidate_topk_blocks * config.candidate_block_size
    rules = {
        f"{small} must be at least 1": small is None,
        f"{large} is larger than any model's, at most {LARGEST.get(large or '', MAX_SIZE)}": large is None,
        f"{odd} must be a finite number above 0": odd is None,
        f"compress_ratios has {len(ratios)} entries for {layers} layers and {config.num_nextn_predict_layers} DSpark stages": (
            len(ratios) == layers + config.num_nextn_predict_layers
        ),
        "compress_ratios may hold 0, 1 and 2 only, and 0 for DSpark": (
            set(ratios) <= {0, 1, 2} and not any(ratios[layers:])
        ),
        "kv_source_layer_ids must be rising layers": _rising(sources, layers),
        "index_source_layer_ids must be rising layers that include every kv source": (
            _rising(indexers, layers) and set(sources) <= set(indexers)
        ),
        "every layer with a ratio needs a kv source of that ratio at or before it": all(
            any(source <= layer for source in sources) and ratios[config.kv_source(layer)] == ratios[layer]
            for layer in range(min(layers, len(ratios)))
            if ratios[layer]
        ),
        "candidate_source_layer_id must be the last kv source": sources[-1:] == (config.candidate_source_layer_id,),
        f"candidate_topk_blocks * candidate_block_size = {chosen} must be at least index_topk": chosen >= config.index_topk,
        "head counts must be multiples of o_groups": config.num_attention_heads % max(config.o_groups, 1) == 0,
        "qk_rope_head_dim must be even and at most head_dim and index_head_dim": (
            config.qk_rope_head_dim % 2 == 0 and config.qk_rope_head_dim <= min(config.head_dim, config.index_head_dim)
        ),
        "channel counts must be multiples of 32": not any(
            value % 32
            for value in (
                config.head_dim,
                config.index_head_dim,
                config.engram_head_dim,
                config.hidden_size,
                config.q_lora_rank,
                config.o_lora_rank,
                config.moe_intermediate_size,
            )
        ),
        "engram_num_embeddings needs one entry per engram layer": (
            len(config.engram_num_embeddings) == len(config.engram_layer_ids) and _rising(config.engram_layer_ids, layers)
        ),
        "dspark_target_layer_ids must be rising layers": _rising(config.dspark_target_layer_ids, layers),
        "token ids must lie inside the vocabulary": (
            max(config.dspark_noise_token_id, config.engram_pad_token_id) < config.vocab_size
        ),
        "num_experts_per_tok must not exceed the experts": (
            config.num_experts_per_tok <= config.n_routed_experts
            and config.dspark_num_experts_per_tok <= config.dspark_n_routed_experts
        ),
    }  # fmt: skip
    return next((problem for problem, holds in rules.items() if not holds), "")


def _rising(layers: tuple[int, ...], limit: int) -> bool:
    return all(low < high for low, high in pairwise((-1, *layers, limit)))
