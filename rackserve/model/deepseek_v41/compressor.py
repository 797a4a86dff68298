"""Compressed KV: one row per token (ratio 1) or per two (ratio 2), and the key by which an indexer finds it."""

from __future__ import annotations

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.pointwise import total
from rackserve.model.deepseek_v41.rotation import Rotation
from rackserve.model.deepseek_v41.rounding import pack_fp4, pack_fp4_fine
from rackserve.model.deepseek_v41.spans import Span
from rackserve.model.deepseek_v41.state import Arena
from rackserve.model.deepseek_v41.streams import rms_norm
from rackserve.model.deepseek_v41.weights import Weights


class Compressor:
    """The compressor of KV source `layer`. `gated` is its number among the ratio-2 sources, -1 for ratio 1."""

    __slots__ = ("_config", "_freqs", "_gate", "_k_norm", "_linear", "_norm", "_ratio", "_wk", "_wkv", "gated", "layer")

    def __init__(self, config: DeepseekV41Config, weights: Weights, layer: int, linear: Linear, freqs: Tensor) -> None:
        self._config, self._linear, self._freqs = config, linear, freqs
        self.layer, self._ratio = layer, config.compress_ratios[layer]
        name = f"layers.{layer}.attn"
        sources = [source for source in config.kv_source_layer_ids if config.has_gate(source)]
        self.gated = sources.index(layer) if layer in sources else -1
        self._wkv, self._norm = weights.matrix(f"{name}.compressor.wkv"), weights.vector(f"{name}.compressor.norm")
        self._gate = weights.matrix(f"{name}.compressor.wgate") if self.gated >= 0 else None
        self._wk, self._k_norm = weights.matrix(f"{name}.indexer.wk"), weights.vector(f"{name}.indexer.k_norm")

    def compress(self, x: Tensor, spans: list[Span], arena: Arena) -> Tensor | None:
        """Write the rows that become complete in `spans`, from the layer's normed input `x` [T, hidden].

        Returns every position's kv and gate, float32 [T, 2, head_dim] (ratio 2), for the sequences to keep.
        """
        kv = self._linear.plain(x, self._wkv)
        pending = None if self._gate is None else torch.stack((kv, self._linear.plain(x, self._gate)), 1)
        if not spans:
            return pending
        latents: list[Tensor] = []
        numbers: list[Tensor] = []
        for span in spans:
            done = (span.start + span.replayed) // self._ratio  # rows before this one are in the blocks already
            first, last = max(span.start // self._ratio, done), span.end // self._ratio
            numbers.append(torch.arange(first, max(first, last)))
            if pending is None:
                latents.append(kv[span.rows][first - span.start :])
            else:
                latents.append(self._join(pending[span.rows], span, numbers[-1]))
        latent = rms_norm(torch.cat(latents), self._norm, self._config.rms_norm_eps)
        rotation = Rotation(self._freqs, torch.cat(numbers) * self._ratio)
        main = pack_fp4_fine(rotation.apply(latent))
        keys = rms_norm(self._linear.plain(latent, self._wk), self._k_norm, self._config.rms_norm_eps)
        packed = pack_fp4(rotation.apply(keys))
        at = 0
        for span, rows in zip(spans, numbers, strict=True):
            if len(rows):
                arena.write("main", self.layer, span.blocks, int(rows[0]), main[at : at + len(rows)])
                arena.write("index", self.layer, span.blocks, int(rows[0]), packed[at : at + len(rows)])
                at += len(rows)
        return pending

    def _join(self, pending: Tensor, span: Span, numbers: Tensor) -> Tensor:
        """Pairs of tokens joined channel by channel; the first of the first pair may have come in an earlier pass."""
        begin = span.start
        if span.start % 2:
            pending = torch.cat((span.state.open[self.gated][None], pending))
            begin -= 1
        first = 2 * numbers - begin
        kv, gates = (torch.stack((pending[first, part], pending[first + 1, part]), 1) for part in (0, 1))
        return total(kv * gates.softmax(1), 1)[:, 0]
