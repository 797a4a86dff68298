"""Elementwise functions and short sums whose results do not depend on where a value lies in its tensor.

Torch computes the last few values of a tensor, and those of a strided one, by other code than the rest, and that code rounds
differently. So values are laid out here such that one of the two is taken always: that which the reference implementation,
computing whole sequences at once, takes for nearly all of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

import torch
from torch import Tensor

LANES = 64
"""Values that vector code takes at a time, or a multiple of that."""


def steady(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of every value of `x`, by vector code alone."""
    flat = x.reshape(-1)
    return function(torch.nn.functional.pad(flat, (0, -len(flat) % LANES)))[: len(flat)].view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), with an exponential that is rounded right."""
    return 1 / (1 + torch.exp(-x.double()).float())


def total(x: Tensor, dim: int) -> Tensor:
    """Sum over a short dimension, added up in order, which is kept with size 1."""
    return reduce(add, x.split(1, dim))


def fused(x: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """x * scale + base, rounded once."""
    return torch.addcmul(base.double(), x.double(), scale.double()).float()
