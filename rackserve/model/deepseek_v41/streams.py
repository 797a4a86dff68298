"""The residual streams: single-pass manifold-constrained hyper-connections (mHC), and RMS normalisation.

Each sublayer works on one vector collapsed from the streams; what it yields and the streams are mixed into new streams. The
weights of a collapse are computed one sublayer ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.pointwise import fused, sigmoid, total
from rackserve.model.deepseek_v41.weights import Weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., d] over its root mean square, times `weight` [d]."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights of one sublayer: `pre` [T, n] to collapse the next one's input, `post` [T, n], `comb` [T, source, target]."""

    pre: Tensor
    post: Tensor
    comb: Tensor


class Mixer:
    """The mixing of one sublayer."""

    __slots__ = ("_base", "_config", "_fn", "_linear", "_scale")

    def __init__(self, config: DeepseekV41Config, weights: Weights, name: str, linear: Linear) -> None:
        """`name`: as in "layers.3.hc_attn"."""
        self._config = config
        self._linear = linear
        self._fn = weights.vector(f"{name}_fn").t().contiguous()
        self._base = weights.vector(f"{name}_base")
        n = config.hc_mult
        self._scale = weights.vector(f"{name}_scale").repeat_interleave(torch.tensor([n, n, n * n]))

    def mix(self, streams: Tensor) -> Mix:
        """Mixing weights from `streams` [T, n, d]."""
        config, n = self._config, self._config.hc_mult
        x = streams.flatten(1)
        m = self._linear.times(x, self._fn) * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        m = fused(m, self._scale, self._base)
        pre = sigmoid(m[:, :n]) + config.hc_eps
        post = 2 * sigmoid(m[:, n : 2 * n])
        comb = m[:, 2 * n :].unflatten(-1, (n, n)).contiguous().softmax(-1) + config.hc_eps
        comb = comb / (total(comb, 1) + config.hc_eps)
        for _ in range(config.hc_sinkhorn_iters - 1):
            comb = comb / (total(comb, 2) + config.hc_eps)
            comb = comb / (total(comb, 1) + config.hc_eps)
        return Mix(pre, post, comb)


def first_pre(num_rows: int, num_streams: int) -> Tensor:
    """The collapse weights before the first layer: stream 0 alone."""
    pre = torch.zeros(num_rows, num_streams)
    pre[:, 0] = 1
    return pre


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """[T, n, d] -> [T, d], stream after stream so that the sum does not depend on T."""
    return total(pre[:, :, None] * streams, 1)[:, 0]


def expand(y: Tensor, streams: Tensor, mix: Mix) -> Tensor:
    """New streams [T, n, d] from a sublayer's result `y` [T, d] and the streams before it."""
    return mix.post[:, :, None] * y[:, None] + total(mix.comb[..., None] * streams[:, :, None], 1)[:, 0]
