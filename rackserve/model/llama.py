"""Llama in float32: weights upcast once, KV in the arena, every output row independent of the rows beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rackserve.model.attention import Attention, Span
from rackserve.model.config import LlamaConfig
from rackserve.model.kv_arena import KvArena
from rackserve.model.loader.safetensors import TensorFiles
from rackserve.model.products import MIN_ROWS, MODES, Mode, Products, choose, rows_agree


@dataclass(slots=True)
class LayerWeights:
    """One layer, matrices as [in, out] float32: in this order most libraries keep the rows of a product apart."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class LlamaWeights:
    """All weights, and how to multiply by them on this machine.

    embedding  [vocab, hidden] as stored, on shared pages
    head       float32 [hidden, vocab]
    products   tried with these matrices when they were loaded
    """

    config: LlamaConfig
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    products: Products


def load_weights(folder: Path, config: LlamaConfig) -> LlamaWeights:
    """Weights of a Hugging Face folder. FileFormatError names file, tensor and shapes."""
    hidden, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    with TensorFiles(folder) as files:

        def matrix(*parts: tuple[str, int], inner: int) -> Tensor:
            read = [files.read(f"{name}.weight", (rows, inner)).float() for name, rows in parts]
            return torch.cat(read).t().contiguous()

        def norm(name: str) -> Tensor:
            return files.read(f"{name}.weight", (hidden,)).float()

        def layer(number: int) -> LayerWeights:
            base = f"model.layers.{number}"
            attention, mlp = f"{base}.self_attn", f"{base}.mlp"
            qkv = ((f"{attention}.q_proj", heads), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv))
            gate_up = ((f"{mlp}.gate_proj", config.ffn_size), (f"{mlp}.up_proj", config.ffn_size))
            return LayerWeights(
                attention_norm=norm(f"{base}.input_layernorm"),
                qkv=matrix(*qkv, inner=hidden),
                output=matrix((f"{attention}.o_proj", hidden), inner=heads),
                ffn_norm=norm(f"{base}.post_attention_layernorm"),
                gate_up=matrix(*gate_up, inner=hidden),
                down=matrix((f"{mlp}.down_proj", hidden), inner=config.ffn_size),
            )

        layers = [layer(number) for number in range(config.num_layers)]
        head = matrix(("model.embed_tokens" if config.tied else "lm_head", config.vocab_size), inner=hidden)
        shapes = (layers[0].qkv, layers[0].output, layers[0].gate_up, layers[0].down, head)
        return LlamaWeights(
            config=config,
            embedding=files.read("model.embed_tokens.weight", (config.vocab_size, hidden)),
            layers=layers,
            norm=norm("model.norm"),
            head=head,
            products=choose(lambda products: all(rows_agree(products, matrix) for matrix in shapes)),
        )


class Llama:
    """The forward pass over one arena."""

    __slots__ = ("_arena", "_attention", "_cos", "_sin", "_weights")

    def __init__(self, weights: LlamaWeights, arena: KvArena) -> None:
        config = weights.config
        self._weights = weights
        self._arena = arena
        self._attention = Attention(arena, config.num_heads)
        inverse = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.outer(torch.arange(config.max_positions).float(), inverse)
        self._cos = angles.cos().repeat(1, 2)[:, None, :]
        self._sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None, :]

    @property
    def path(self) -> str:
        """What computes."""
        return "torch"

    @property
    def products(self) -> Mode:
        """How products are computed: the slower of what the weights and the attention need."""
        return max(self._weights.products.mode, self._attention.products.mode, key=MODES.index)

    def forward(self, tokens: Tensor, spans: Sequence[Span]) -> Tensor:
        """Compute positions and store their KV; returns what `logits` takes.

        tokens: int64 [rows], the tokens of all `spans` one after the other; spans of one token come first.
        """
        config, weights, arena, mm = self._weights.config, self._weights, self._arena, self._weights.products.mm
        rows = len(tokens)
        positions = torch.cat([torch.arange(span.start, span.start + span.num_tokens) for span in spans])
        slots = self._slots(spans)
        plan = self._attention.plan(spans)
        if rows < MIN_ROWS:
            tokens, positions = tokens.repeat(MIN_ROWS)[:MIN_ROWS], positions.repeat(MIN_ROWS)[:MIN_ROWS]
        cos, sin = self._cos[positions], self._sin[positions]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        mixed = torch.zeros(len(tokens), heads * config.head_dim)
        hidden = torch.nn.functional.embedding(tokens, weights.embedding).float()
        for number, layer in enumerate(weights.layers):
            qkv = mm(self._norm(hidden, layer.attention_norm), layer.qkv).view(len(tokens), -1, config.head_dim)
            query, key, value = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
            arena.write(number, slots, _rotate(key, cos, sin)[:rows], value[:rows])
            self._attention.attend(number, plan, _rotate(query, cos, sin)[:rows], mixed)
            hidden = hidden + mm(mixed, layer.output)
            gate, up = mm(self._norm(hidden, layer.ffn_norm), layer.gate_up).chunk(2, -1)
            hidden = hidden + mm(_silu(gate).mul_(up), layer.down)
        return hidden

    def logits(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        """Logits float32 [len(wanted), vocab] of the rows in `wanted`, int64, of what `forward` returned."""
        count = len(wanted)
        if count == 0:
            return torch.empty(0, self._weights.config.vocab_size)
        if count < MIN_ROWS:
            wanted = wanted.repeat(MIN_ROWS)[:MIN_ROWS]
        return self._weights.products.mm(self._norm(hidden[wanted], self._weights.norm), self._weights.head)[:count]

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(hidden, weight.shape, weight, self._weights.config.norm_eps)

    def _slots(self, spans: Sequence[Span]) -> Tensor:
        """Where the KV of all rows goes, for `KvArena.write`."""
        size = self._arena.block_tokens
        places = [
            (span.blocks[at // size], at % size) for span in spans for at in range(span.start, span.start + span.num_tokens)
        ]
        blocks, offsets = torch.tensor(places, dtype=torch.int64).unbind(1)
        return self._arena.slots_of(blocks, offsets)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [rows, heads, head_dim]; `sin` carries the sign of the first half."""
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin


def _silu(gate: Tensor) -> Tensor:
    """x / (1 + exp(-x)). torch's own `silu` takes another exponential for what its vectors leave over at the end of memory."""
    return gate / gate.neg().exp_().add_(1.0)
