"""What the kernels' tests are made of: random tensors, and arenas whose unused bytes are poison, with nothing behind them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.fence import Fence

POISON = 0x7F
"""As e4m3 not a number, as e2m1 minus-free sixes, as an exponent vast."""


class Current:
    """The fence of the test that runs; the first one is of what modules draw."""

    fence = Fence()


def fenced(values: Tensor) -> Tensor:
    """The same numbers, behind which a page begins that nobody may touch."""
    bits = values.contiguous().view(torch.uint8) if values.numel() else values.new_zeros(0, dtype=torch.uint8)
    copied = torch.from_numpy(Current.fence.copy(bits.numpy(), writable=True))
    return copied.view(values.dtype).view(values.shape)


def empty(*shape: int, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
    """In place of `torch.empty`: what nobody writes is NaN."""
    size = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    made = torch.from_numpy(Current.fence.empty(size.numel() * dtype.itemsize, "u1"))
    return made.view(dtype).view(size)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return fenced(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def whole(*shape: int, most: int, seed: int = 0) -> Tensor:
    """Whole numbers of either sign, as float32: their sums are exact in any order."""
    return fenced(torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float())


def poisoned(*shape: int) -> Tensor:
    return fenced(torch.full(shape, POISON, dtype=torch.uint8))


def ending(numbers: Tensor, last: int, *place: int) -> Tensor:
    """The same numbers, each once, with the arena's `last` at `place`: what is read past its end is read past the arena's."""
    numbers[numbers == last] = numbers[place].clone()
    numbers[place] = last
    return numbers


def edges(channels: int) -> Tensor:
    """Rows over many sizes; ties between two codes of every scale, zeros of both signs, and the largest of a scale."""
    rows = noise(16, channels) * torch.logspace(-20, 6, 16)[:, None]
    halves = torch.arange(channels).float() / 4 - channels / 8
    ties = torch.stack([halves * 2.0**power for power in (-8, -1, 0, 6)])
    rows[3] = 0.0
    rows[4, ::2] = -0.0
    return fenced(torch.cat([rows, ties, ties + ties.abs() * 2.0**-23]))


def permuted(count: int, seed: int = 0) -> Tensor:
    return fenced(torch.randperm(count, generator=torch.Generator().manual_seed(seed)))
