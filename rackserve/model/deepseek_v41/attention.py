"""Attention of one layer: a window of recent rows and rows chosen from compressed KV, in one softmax with a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.rotation import Rotation
from rackserve.model.deepseek_v41.rounding import pack_fp8
from rackserve.model.deepseek_v41.streams import rms_norm
from rackserve.model.deepseek_v41.weights import Weights
from rackserve.model.parallel import Collectives
from rackserve.model.products import Products

QUERIES_AT_ONCE = 32
"""Bounds the rows gathered for attention: each query has its own."""


class Attention:
    """Projections of one layer ("layers.3.attn") or DSpark stage ("mtp.0.attn"), this device's heads alone."""

    __slots__ = ("_collectives", "_config", "_groups", "_kv_norm", "_linear", "_q_norm", "_wkv", "_wo_a", "_wo_b", "_wq_a",
                 "_wq_b", "sink")  # fmt: skip

    def __init__(
        self, config: DeepseekV41Config, weights: Weights, name: str, linear: Linear, collectives: Collectives
    ) -> None:
        self._config, self._linear, self._collectives = config, linear, collectives
        self._wq_a, self._wq_b = weights.matrix(f"{name}.wq_a"), weights.matrix(f"{name}.wq_b")
        self._wkv, self._wo_a, self._wo_b = (weights.matrix(f"{name}.{part}") for part in ("wkv", "wo_a", "wo_b"))
        self._q_norm, self._kv_norm = weights.vector(f"{name}.q_norm"), weights.vector(f"{name}.kv_norm")
        self.sink = weights.vector(f"{name}.attn_sink")
        self._groups = config.o_groups // collectives.share.tp_size

    def latent(self, x: Tensor) -> Tensor:
        """The compressed query [T, q_lora_rank], which the indexer reads too."""
        return rms_norm(self._linear(x, self._wq_a), self._q_norm, self._config.rms_norm_eps)

    def query(self, latent: Tensor, rotation: Rotation) -> Tensor:
        """Queries [T, heads, head_dim]."""
        heads = self._linear(latent, self._wq_b).unflatten(-1, (-1, self._config.head_dim))
        return rotation.apply(heads)

    def rows(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Window rows, packed: each is key and value at once."""
        return pack_fp8(rotation.apply(rms_norm(self._linear(x, self._wkv), self._kv_norm, self._config.rms_norm_eps)))

    def output(self, attended: Tensor, rotation: Rotation) -> Tensor:
        """[T, heads, head_dim] -> [T, hidden], summed over the devices of the rank."""
        turned = rotation.apply(attended, inverse=True)
        grouped = turned.flatten(1).unflatten(1, (self._groups, -1))
        right, rank = self._wo_a.right(), self._config.o_lora_rank
        parts = [
            self._linear.times(grouped[:, group], right[:, group * rank : (group + 1) * rank]) for group in range(self._groups)
        ]
        return self._collectives.tp_sum(self._linear(torch.cat(parts, -1), self._wo_b))


def attend(products: Products, queries: Tensor, rows: Tensor, there: Tensor, sink: Tensor) -> Tensor:
    """Softmax attention of each query over its own rows, which are keys and values at once.

    queries [n, heads, dim], rows [n, r, dim], there [n, r] (bool: whether the row exists), sink [heads]: a logit whose value is
    zero. Returns [n, heads, dim]; zero where no row exists.
    """
    count, heads, dim = queries.shape
    scores = queries.new_empty(count, heads, rows.shape[1])
    products.bmm(queries.contiguous(), rows.transpose(1, 2).contiguous(), scores, 1)
    scores = (scores * dim**-0.5).masked_fill(~there[:, None], -torch.inf)
    shares = torch.cat((sink[:, None].expand(count, -1, 1), scores), -1).softmax(-1)[..., 1:]
    out = torch.empty_like(queries)
    products.bmm(shares.contiguous(), rows, out, 1)
    return out
