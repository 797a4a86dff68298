"""Elementwise functions and short sums whose results do not depend on where a value lies in its tensor.

Libraries compute the last few values of a tensor, and strided ones, by other code than the rest: torch's sigmoid, silu, softplus
and softmax round differently there. Made of exp, log1p and plain arithmetic, which do not, they are the same everywhere.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), without overflow."""
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def total(x: Tensor, dim: int) -> Tensor:
    """Sum over a short dimension, added up in order, which is kept with size 1."""
    return reduce(add, x.split(1, dim))


def softmax(x: Tensor, dim: int) -> Tensor:
    """Shares over a short dimension."""
    shares = torch.exp(x - x.amax(dim, keepdim=True))
    return shares / total(shares, dim)
