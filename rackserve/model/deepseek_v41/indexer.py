"""The indexer: which compressed rows each position reads, by a cheap score and a two-level choice.

Ties go to the lowest row number. Relu makes exact ties common, and without a rule a chunked pass would choose other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.rotation import Rotation
from rackserve.model.deepseek_v41.rounding import round_fp4, unpack_fp4
from rackserve.model.deepseek_v41.spans import Span
from rackserve.model.deepseek_v41.state import Arena
from rackserve.model.deepseek_v41.weights import Weights

ROWS_AT_ONCE = 256
"""Keys are scored in products of this one width, so that a score does not depend on how many rows there are."""


class Indexer:
    """The indexer of `layer`, over the keys of its KV source."""

    __slots__ = ("_config", "_layer", "_linear", "_ratio", "_source", "_weights_proj", "_wq_b")

    def __init__(self, config: DeepseekV41Config, weights: Weights, layer: int, linear: Linear) -> None:
        self._config, self._linear, self._layer = config, linear, layer
        self._source, self._ratio = config.kv_source(layer), config.compress_ratios[layer]
        name = f"layers.{layer}.attn.indexer"
        self._wq_b, self._weights_proj = weights.matrix(f"{name}.wq_b"), weights.matrix(f"{name}.weights_proj")

    def select(self, latent: Tensor, x: Tensor, rotation: Rotation, spans: list[Span], arena: Arena) -> None:
        """Set `selected` of each span (and `candidates`, if this layer publishes them), from the attention's inputs."""
        config = self._config
        queries = self._linear(latent, self._wq_b).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        queries = round_fp4(rotation.apply(queries))
        weights = self._linear.plain(x, self._weights_proj) * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        for span in spans:
            visible = span.visible(self._ratio)
            if self._layer == self._source:
                numbers = torch.arange(span.end // self._ratio)
                packed = arena.read("index", self._source, span.blocks, numbers)
                span.keys = unpack_fp4(packed, config.index_head_dim)
            assert span.keys is not None
            scores = self._scores(queries[span.rows], weights[span.rows], span.keys)
            hidden = torch.arange(scores.shape[1]) >= visible[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
            if self._layer == config.candidate_source_layer_id:
                span.candidates = self._candidates(scores, visible)
            elif span.candidates is not None:
                scores = scores.masked_fill(~span.candidates, -torch.inf)
            span.selected = best(scores, config.index_topk)

    def _scores(self, queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """Sum over heads of weight times relu(query . key): [n, rows], from queries [n, heads, dim] and keys [rows, dim]."""
        count, heads, dim = queries.shape
        flat = queries.reshape(count * heads, dim)
        parts = [queries.new_empty(count, 0)]
        for begin in range(0, len(keys), ROWS_AT_ONCE):
            tile = keys.new_zeros(ROWS_AT_ONCE, dim)
            width = min(ROWS_AT_ONCE, len(keys) - begin)
            tile[:width] = keys[begin : begin + width]
            dots = self._linear.times(flat, tile.t().contiguous()).relu_().unflatten(0, (count, heads))
            total = weights[:, :1] * dots[:, 0]
            for head in range(1, heads):
                total = total + weights[:, head, None] * dots[:, head]
            parts.append(total[:, :width])
        return torch.cat(parts, 1)

    def _candidates(self, scores: Tensor, visible: Tensor) -> Tensor:
        """The rows of the best blocks of rows, that of the newest visible row always among them: bool like `scores`."""
        size, width = self._config.candidate_block_size, scores.shape[1]
        if not width:
            return scores.new_empty(scores.shape, dtype=torch.bool)
        padded = torch.nn.functional.pad(scores, (0, -width % size), value=-torch.inf)
        blocks = padded.unflatten(1, (-1, size)).amax(-1)
        newest = (visible - 1) // size
        seen = visible > 0
        blocks[seen.nonzero()[:, 0], newest[seen]] = torch.inf
        chosen = best(blocks, self._config.candidate_topk_blocks)
        mask = torch.zeros(len(blocks), blocks.shape[1] + 1, dtype=torch.bool)
        mask.scatter_(1, chosen.where(chosen >= 0, blocks.shape[1]), True)
        return mask[:, :-1].repeat_interleave(size, 1)[:, :width]


def best(scores: Tensor, count: int) -> Tensor:
    """The numbers of the `count` largest of each row of `scores` [n, m], lowest first among equals, -1 for minus infinity.

    int64 [n, count], ascending, the -1 in front.
    """
    values, order = scores.sort(dim=1, descending=True, stable=True)
    chosen = order[:, :count].masked_fill(values[:, :count] == -torch.inf, -1)
    chosen = torch.nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=-1)
    return chosen.sort(1).values
