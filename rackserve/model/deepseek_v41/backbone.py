"""The forward pass of the text model over rows of several sequences.

The first layers (the encoder) and the last KV source's compressor fill everything that later positions read of this one; the
layers after it (the decoder) are needed only where output or window state is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.attention import QUERIES_AT_ONCE, attend
from rackserve.model.deepseek_v41.block import Block
from rackserve.model.deepseek_v41.compressor import Compressor
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.indexer import Indexer
from rackserve.model.deepseek_v41.injection import Injection
from rackserve.model.deepseek_v41.layout import window_row_bytes
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.rotation import Rotation, frequencies
from rackserve.model.deepseek_v41.rounding import unpack_fp4_fine, unpack_fp8
from rackserve.model.deepseek_v41.spans import Span, positions_of, tails
from rackserve.model.deepseek_v41.state import Arena, Proposal
from rackserve.model.deepseek_v41.streams import collapse, first_pre, rms_norm
from rackserve.model.deepseek_v41.weights import Weights
from rackserve.model.parallel import Collectives

Attend = Callable[[Tensor], Tensor]


class EngramRows(Protocol):
    """Engram rows on their way, asked for before the pass began."""

    def rows(self, layer: int) -> Tensor:
        """The table rows of each of the pass's rows: float32 [T, columns * engram_head_dim]."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass leaves: `hidden` [kept, d], collapsed; `place`: which row of it each row of the pass is, -1 if none."""

    hidden: Tensor
    place: Tensor
    proposals: list[Proposal]


class Layers(Protocol):
    """All layers of one device, over the rank's arena."""

    @property
    def path(self) -> str:
        """What computes: an instruction set, or torch."""

    def forward(self, tokens: list[int], spans: list[Span], engram: EngramRows) -> Pass:
        """Compute the rows of `spans`, in order, with these ids. Writes global rows to the arena; all else is proposed."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows of `Pass.hidden`: float32 [n, vocab]."""


class Embedding:
    """Token embedding and output head, this device's part of the vocabulary; DSpark uses both too."""

    __slots__ = ("_collectives", "_first", "_head", "_linear", "_weights")

    def __init__(self, weights: Weights, linear: Linear, collectives: Collectives) -> None:
        self._weights, self._linear, self._collectives = weights, linear, collectives
        self._head = weights.matrix("head")
        self._first = collectives.share.tp_rank * weights.num_rows("embed")

    def rows(self, name: str, tokens: Tensor) -> Tensor:
        """Rows of the table `name` ("embed") for int64 `tokens` [T]: [T, width]."""
        count = self._weights.num_rows(name)
        local = tokens - self._first
        mine = (local >= 0) & (local < count)
        rows = self._weights.rows(name, local.where(mine, 0)).masked_fill(~mine[:, None], 0.0)
        return self._collectives.tp_sum(rows)

    def logits(self, x: Tensor) -> Tensor:
        """[T, d] -> float32 [T, vocab]."""
        return self._collectives.tp_concat(self._linear.plain(x, self._head))


class Backbone:
    """All layers on one device, over the rank's `arena`."""

    __slots__ = ("_arena", "_blocks", "_compressors", "_config", "_freqs", "_indexers", "_injections", "_linear", "_norm",
                 "embedding")  # fmt: skip

    path = "torch"

    def __init__(
        self, config: DeepseekV41Config, weights: Weights, arena: Arena, linear: Linear, collectives: Collectives
    ) -> None:
        self._config, self._arena, self._linear = config, arena, linear
        self._freqs = {compressed: frequencies(config, compressed=compressed) for compressed in (False, True)}
        self._blocks = [
            Block(config, weights, f"layers.{layer}", linear, collectives, config.n_routed_experts, config.num_experts_per_tok)
            for layer in range(config.num_hidden_layers)
        ]
        self._compressors = {
            layer: Compressor(config, weights, layer, linear, self._freqs[True]) for layer in config.kv_source_layer_ids
        }
        self._indexers = {layer: Indexer(config, weights, layer, linear) for layer in config.index_source_layer_ids}
        self._injections = {layer: Injection(config, weights, layer, linear) for layer in config.engram_layer_ids}
        self._norm = weights.vector("norm")
        self.embedding = Embedding(weights, linear, collectives)

    def forward(self, tokens: list[int], spans: list[Span], engram: EngramRows) -> Pass:
        """Compute the rows of `spans`, in order, with these ids. Writes global rows to the arena; all else is proposed."""
        config, count = self._config, len(tokens)
        windows = torch.zeros(config.num_hidden_layers, count, window_row_bytes(config), dtype=torch.uint8)
        gated = [compressor for compressor in self._compressors.values() if compressor.gated >= 0]
        pending = torch.zeros(len(gated), count, 2, config.head_dim)
        features = torch.zeros(count, len(config.dspark_target_layer_ids), config.hidden_size)
        positions, kept, whole = positions_of(spans), torch.arange(count), spans
        rotations = {compressed: Rotation(freqs, positions) for compressed, freqs in self._freqs.items()}
        streams = self.embedding.rows("embed", torch.tensor(tokens, dtype=torch.int64))
        streams = streams[:, None].repeat(1, config.hc_mult, 1)
        pre = first_pre(count, config.hc_mult)
        for layer, block in enumerate(self._blocks):
            if layer in self._injections:
                streams = self._injections[layer].inject(streams, engram.rows(layer)[kept])
            if layer in config.dspark_target_layer_ids:
                features[kept, config.dspark_target_layer_ids.index(layer)] = streams.mean(1)
            x = block.attention_input(streams, pre)
            if layer in self._compressors:
                compressor = self._compressors[layer]
                open_groups = compressor.compress(x, spans, self._arena)
                if open_groups is not None:
                    pending[compressor.gated, kept] = open_groups
            if layer == config.first_decoder_layer and any(span.full_from > span.start for span in spans):
                spans, rows = tails(spans)
                streams, pre, x, kept = streams[rows], pre[rows], x[rows], kept[rows]
                rotations = {compressed: rotation.pick(rows) for compressed, rotation in rotations.items()}
            rotation = rotations[config.compress_ratios[layer] > 0]
            packed = block.attention.rows(x, rotation)
            windows[layer, kept] = packed
            streams, pre = block.join(streams, x, self._attention(layer, spans, packed, rotation))
        place = torch.full((count,), -1, dtype=torch.int64)
        place[kept] = torch.arange(len(kept))
        proposals = [
            Proposal(
                span.start, windows[:, span.rows], pending[:, span.rows], features[span.rows].flatten(1), tokens[span.rows]
            )
            for span in whole
        ]
        return Pass(collapse(streams, pre), place, proposals)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows of `Pass.hidden`: float32 [n, vocab]."""
        return self.embedding.logits(rms_norm(hidden, self._norm, self._config.rms_norm_eps))

    def _attention(self, layer: int, spans: list[Span], packed: Tensor, rotation: Rotation) -> Attend:
        """The attention of `layer` as a function of its input, over the window rows `packed` [T] of this pass and earlier."""
        attention, indexer = self._blocks[layer].attention, self._indexers.get(layer)

        def run(x: Tensor) -> Tensor:
            latent = attention.latent(x)
            if indexer is not None:
                indexer.select(latent, x, rotation, spans, self._arena)
            queries = attention.query(latent, rotation)
            attended = torch.empty_like(queries)
            for span in spans:
                self._attend_span(layer, span, queries, packed, attended, attention.sink)
            return attention.output(attended, rotation)

        return run

    def _attend_span(self, layer: int, span: Span, queries: Tensor, packed: Tensor, out: Tensor, sink: Tensor) -> None:
        config, width = self._config, self._config.sliding_window
        earlier, there = span.state.before(layer, torch.arange(span.start - width + 1, span.start))
        context = unpack_fp8(torch.cat((earlier, packed[span.rows])), config.head_dim)
        there = torch.cat((there, torch.ones(span.count, dtype=torch.bool)))
        source = config.kv_source(layer)
        for begin in range(0, span.count, QUERIES_AT_ONCE):
            part = slice(begin, min(begin + QUERIES_AT_ONCE, span.count))
            near = torch.arange(part.start, part.stop)[:, None] + torch.arange(width)
            rows, exists = context[near], there[near]
            if source >= 0:
                assert span.selected is not None
                chosen = span.selected[part]
                far = self._arena.read("main", source, span.blocks, chosen.clamp(min=0))
                rows = torch.cat((rows, unpack_fp4_fine(far, config.head_dim)), 1)
                exists = torch.cat((exists, chosen >= 0), 1)
            rows = rows.masked_fill(~exists[..., None], 0.0)  # what is not there may be the bytes of anything
            place = slice(span.first + part.start, span.first + part.stop)
            out[place] = attend(self._linear.products, queries[place], rows, exists, sink)
