"""Rotary position embedding of the last channels of a row, in adjacent pairs, with and without YaRN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.config import DeepseekV41Config


def frequencies(config: DeepseekV41Config, *, compressed: bool) -> Tensor:
    """Angle per position of each pair, float32 [qk_rope_head_dim / 2].

    Layers that read compressed KV (`compressed`) use their own base and YaRN for everything in them, others plain rotation.
    """
    dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    plain = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if not compressed:
        return plain
    yarn = config.rope_scaling

    def channel(rotations: float) -> float:
        """The channel that makes so many rotations over the original context."""
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


class Rotation:
    """Rotations at given positions: made once per pass, used by every layer of one kind."""

    __slots__ = ("_cos", "_dim", "_sin")

    def __init__(self, freqs: Tensor, positions: Tensor) -> None:
        """`freqs` from `frequencies`, `positions` int64 [T]."""
        angles = positions.float()[:, None] * freqs
        turns = torch.polar(torch.ones_like(angles), angles)
        self._cos, self._sin = turns.real, turns.imag
        self._dim = 2 * len(freqs)

    def apply(self, x: Tensor, *, inverse: bool = False) -> Tensor:
        """`x` [T, channels] or [T, heads, channels] with its last channels turned (back, if `inverse`)."""
        cos, sin = self._cos, -self._sin if inverse else self._sin
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        still, turned = x[..., : -self._dim], x[..., -self._dim :].unflatten(-1, (-1, 2))
        even, odd = turned[..., 0], turned[..., 1]
        both = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return torch.cat((still, both), -1)

    def pick(self, rows: Tensor) -> Rotation:
        """The rotations of some of the positions, by index [n]."""
        picked = Rotation.__new__(Rotation)
        picked._cos, picked._sin, picked._dim = self._cos[rows], self._sin[rows], self._dim
        return picked
