"""How Engram's rows enter the streams: a key per stream decides how much of one value is added."""

from __future__ import annotations

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.pointwise import steady
from rackserve.model.deepseek_v41.weights import Weights


class Injection:
    """The Engram projections of `layer`."""

    __slots__ = ("_config", "_linear", "_weight", "_wkv")

    def __init__(self, config: DeepseekV41Config, weights: Weights, layer: int, linear: Linear) -> None:
        self._config, self._linear = config, linear
        self._wkv = weights.matrix(f"layers.{layer}.engram.wkv")
        name = f"layers.{layer}.engram"
        self._weight = weights.vector(f"{name}.q_weight") * weights.vector(f"{name}.k_weight")

    def inject(self, streams: Tensor, memory: Tensor) -> Tensor:
        """New streams [T, n, d] from `memory` [T, columns * engram_head_dim], the table rows of each position."""
        config = self._config
        found = self._linear(memory, self._wkv)
        keys = found[:, : -config.hidden_size].unflatten(1, (config.hc_mult, config.hidden_size))
        value = found[:, -config.hidden_size :]
        sizes = streams.square().mean(-1), keys.square().mean(-1)
        scale = torch.rsqrt(sizes[0] + config.rms_norm_eps) * torch.rsqrt(sizes[1] + config.rms_norm_eps)
        dot = (streams * self._weight * keys).sum(-1) * scale * config.hidden_size**-0.5
        gate = steady(torch.sigmoid, torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
        return streams + gate[..., None] * value[:, None]
