"""Every tensor of the released checkpoint layout, and which part of it a device of a group holds. No torch needed."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.model.deepseek_v41.config import DeepseekV41Config

if TYPE_CHECKING:  # it imports torch
    from rackserve.model.parallel import Share

TILE = 32
"""Rows and columns that share a scale: 32 x 32 in fp8 matrices, 1 x 32 in fp4 matrices and Engram tables."""

DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
"""Bytes per element of the number formats of this layout, by safetensors tag. I8 holds two fp4 numbers."""

SKIPPED = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
"""How the names of tensors begin that belong to the release but not to the text model."""

Dtype = Literal["F8_E4M3", "F8_E8M0", "I8", "BF16", "F32"]
Cut = Literal["whole", "rows", "columns"]


class TensorSpec(msgspec.Struct, frozen=True):
    """What the layout says about one tensor.

    shape        as stored: fp4 matrices [out, in / 2]
    cut          what the devices of a rank split evenly (tensor parallel); "whole": each holds all of it
    expert       number of the routed expert it belongs to, out of `num_experts`; -1: none
    num_experts  routed experts of its layer; 0: it belongs to none
    table        an Engram table or its scales: read row by row from the file, never loaded
    """

    shape: tuple[int, ...]
    dtype: Dtype
    cut: Cut = "whole"
    expert: int = -1
    num_experts: int = 0
    table: bool = False

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """Numbers of the model in it; scales count as part of the numbers they scale."""
        return 0 if self.dtype == "F8_E8M0" else prod(self.shape) * (2 if self.dtype == "I8" else 1)


def inventory(config: DeepseekV41Config) -> dict[str, TensorSpec]:
    """Every tensor of the text model by its name in the checkpoint, `.scale` tensors included."""
    listing = _Listing(config)
    vocabulary = (config.vocab_size, config.hidden_size)
    listing.bf16("embed.weight", *vocabulary, cut="rows")
    listing.bf16("head.weight", *vocabulary, cut="rows")
    listing.bf16("norm.weight", config.hidden_size)
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        listing.add_block(at, config.n_routed_experts)
        if layer in config.kv_source_layer_ids:
            listing.add_compressor(at, config.has_gate(layer))
        if layer in config.index_source_layer_ids:
            listing.add_indexer(at, layer in config.kv_source_layer_ids)
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        listing.add_engram(f"layers.{layer}.engram", rows)
    listing.add_dspark()
    return listing.tensors


def is_skipped(name: str) -> bool:
    """Whether a tensor outside the inventory belongs to the release all the same."""
    return name.startswith(SKIPPED)


def require_width(config: DeepseekV41Config, tp_size: int, ep_size: int) -> None:
    """ConfigError unless the model can be cut evenly over `tp_size` devices a rank and its experts over `ep_size` ranks."""
    for what, size, parts, unit in (
        ("tensor parallel", "o_groups", tp_size, 1),
        ("tensor parallel", "vocab_size", tp_size, 1),
        ("tensor parallel", "moe_intermediate_size", tp_size, TILE),
        ("expert parallel", "n_routed_experts", ep_size, 1),
        ("expert parallel", "dspark_n_routed_experts", ep_size, 1),
    ):
        value = getattr(config, size)
        if value % (parts * unit):
            pieces = f"{parts} equal parts" + (f" of whole {unit}s" if unit > 1 else "")
            raise ConfigError(f"{what} {parts}: {size} is {value}, which cannot be cut into {pieces}; choose another width")


def owned(spec: TensorSpec, share: Share) -> tuple[slice, ...] | None:
    """The part of a tensor that the device with `share` loads, one slice per dimension; None: nothing of it.

    The width must have passed `require_width`: then scales are cut where the weights they belong to are.
    """
    if spec.table or (spec.num_experts and spec.expert not in share.experts(spec.num_experts)):
        return None
    whole = tuple(slice(0, size) for size in spec.shape)
    if spec.cut == "whole":
        return whole
    at = 0 if spec.cut == "rows" else 1
    return (*whole[:at], share.tp_slice(spec.shape[at], spec.cut), *whole[at + 1 :])


class _Listing:
    """The tensors named so far."""

    __slots__ = ("_config", "tensors")

    def __init__(self, config: DeepseekV41Config) -> None:
        self._config = config
        self.tensors: dict[str, TensorSpec] = {}

    def bf16(self, name: str, *shape: int, cut: Cut = "whole") -> None:
        self.tensors[name] = TensorSpec(shape, "BF16", cut)

    def fp32(self, name: str, *shape: int, cut: Cut = "whole") -> None:
        self.tensors[name] = TensorSpec(shape, "F32", cut)

    def fp8(self, name: str, rows: int, columns: int, cut: Cut = "whole") -> None:
        self.tensors[f"{name}.weight"] = TensorSpec((rows, columns), "F8_E4M3", cut)
        self.tensors[f"{name}.scale"] = TensorSpec((rows // TILE, columns // TILE), "F8_E8M0", cut)

    def fp4(self, name: str, rows: int, columns: int, cut: Cut, expert: int, num_experts: int) -> None:
        self.tensors[f"{name}.weight"] = TensorSpec((rows, columns // 2), "I8", cut, expert, num_experts)
        self.tensors[f"{name}.scale"] = TensorSpec((rows, columns // TILE), "F8_E8M0", cut, expert, num_experts)

    def add_block(self, at: str, num_experts: int) -> None:
        """What every layer and DSpark stage has: attention, experts, norms and the mixing of streams."""
        config = self._config
        hidden, width, rank = config.hidden_size, config.num_attention_heads * config.head_dim, config.q_lora_rank
        self.bf16(f"{at}.attn_norm.weight", hidden)
        self.bf16(f"{at}.ffn_norm.weight", hidden)
        streams = config.hc_mult
        for part in ("attn", "ffn"):
            mixes = (2 + streams) * streams
            self.fp32(f"{at}.hc_{part}_fn", mixes, streams * hidden)
            self.fp32(f"{at}.hc_{part}_base", mixes)
            self.fp32(f"{at}.hc_{part}_scale", 3)
        low = config.o_groups * config.o_lora_rank
        self.fp8(f"{at}.attn.wq_a", rank, hidden)
        self.fp8(f"{at}.attn.wq_b", width, rank, cut="rows")
        self.fp8(f"{at}.attn.wkv", config.head_dim, hidden)
        self.fp8(f"{at}.attn.wo_a", low, width // config.o_groups, cut="rows")
        self.fp8(f"{at}.attn.wo_b", hidden, low, cut="columns")
        self.fp32(f"{at}.attn.attn_sink", config.num_attention_heads, cut="rows")
        self.bf16(f"{at}.attn.q_norm.weight", rank)
        self.bf16(f"{at}.attn.kv_norm.weight", config.head_dim)
        self.bf16(f"{at}.ffn.gate.weight", num_experts, hidden)
        self.fp32(f"{at}.ffn.gate.bias", num_experts)
        self.fp32(f"{at}.ffn.gate.bias_vl", num_experts)
        inner = config.moe_intermediate_size
        for matrix, rows, columns, cut in _expert_matrices(inner, hidden):
            self.fp8(f"{at}.ffn.shared_experts.{matrix}", rows, columns, cut)
            for expert in range(num_experts):
                self.fp4(f"{at}.ffn.experts.{expert}.{matrix}", rows, columns, cut, expert, num_experts)

    def add_compressor(self, at: str, has_gate: bool) -> None:
        config = self._config
        for matrix in ("wkv", "wgate") if has_gate else ("wkv",):
            self.bf16(f"{at}.attn.compressor.{matrix}.weight", config.head_dim, config.hidden_size)
        self.bf16(f"{at}.attn.compressor.norm.weight", config.head_dim)

    def add_indexer(self, at: str, owns_keys: bool) -> None:
        config = self._config
        self.fp8(f"{at}.attn.indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        self.bf16(f"{at}.attn.indexer.weights_proj.weight", config.index_n_heads, config.hidden_size)
        if owns_keys:
            self.bf16(f"{at}.attn.indexer.wk.weight", config.index_head_dim, config.head_dim)
            self.bf16(f"{at}.attn.indexer.k_norm.weight", config.index_head_dim)

    def add_engram(self, at: str, rows: int) -> None:
        config = self._config
        dim, hidden, streams = config.engram_head_dim, config.hidden_size, config.hc_mult
        self.tensors[f"{at}.embed.weight"] = TensorSpec((rows, dim), "F8_E4M3", table=True)
        self.tensors[f"{at}.embed.scale"] = TensorSpec((rows, dim // TILE), "F8_E8M0", table=True)
        self.fp8(f"{at}.wkv", (streams + 1) * hidden, config.engram_columns * dim)
        self.bf16(f"{at}.q_weight", streams, hidden)
        self.bf16(f"{at}.k_weight", streams, hidden)

    def add_dspark(self) -> None:
        """The speculative head: stages shaped like layers, what feeds the first one and what reads the last."""
        config = self._config
        hidden, rank = config.hidden_size, config.dspark_markov_rank
        for stage in range(config.num_nextn_predict_layers):
            self.add_block(f"mtp.{stage}", config.dspark_n_routed_experts)
        self.fp8("mtp.0.main_proj", hidden, len(config.dspark_target_layer_ids) * hidden)
        self.bf16("mtp.0.main_norm.weight", hidden)
        last = f"mtp.{config.num_nextn_predict_layers - 1}"
        self.bf16(f"{last}.norm.weight", hidden)
        self.bf16(f"{last}.markov_head.embed.weight", config.vocab_size, rank, cut="rows")
        self.bf16(f"{last}.markov_head.head.weight", config.vocab_size, rank, cut="rows")
        self.bf16(f"{last}.confidence_head.proj.weight", 1, hidden + rank)


def _expert_matrices(inner: int, hidden: int) -> tuple[tuple[str, int, int, Cut], ...]:
    """(matrix, out, in, cut) of one expert: gate, up, down."""
    return (("w1", inner, hidden, "rows"), ("w3", inner, hidden, "rows"), ("w2", hidden, inner, "columns"))
