"""What the kernels' tests are made of: random tensors, and arenas whose unused bytes are poison."""

from __future__ import annotations

import torch
from torch import Tensor

POISON = 0x7F
"""As e4m3 not a number, as e2m1 minus-free sixes, as an exponent vast."""


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape: int, most: int, seed: int = 0) -> Tensor:
    """Whole numbers of either sign, as float32: their sums are exact in any order."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, POISON, dtype=torch.uint8)


def edges(channels: int) -> Tensor:
    """Rows over many sizes; ties between two codes of every scale, zeros of both signs, and the largest of a scale."""
    rows = noise(16, channels) * torch.logspace(-20, 6, 16)[:, None]
    halves = torch.arange(channels).float() / 4 - channels / 8
    ties = torch.stack([halves * 2.0**power for power in (-8, -1, 0, 6)])
    rows[3] = 0.0
    rows[4, ::2] = -0.0
    return torch.cat([rows, ties, ties + ties.abs() * 2.0**-23])


def permuted(count: int, seed: int = 0) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
