"""Stand-ins for other libraries of matrix products: each scales a row of the right result by what it should not depend on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Scale = Callable[[int], Tensor]
"""From the number of rows to a factor for each."""

STEP = 2.0**-18


def by_itself(rows: int) -> Tensor:
    """Each row as it should be."""
    return torch.ones(rows)


def by_count(rows: int) -> Tensor:
    """Another order of sums for each number of rows."""
    return torch.full((rows,), 1 + rows * STEP)


def by_place(rows: int) -> Tensor:
    """The same, and rows are told apart: no tile makes up for that."""
    return 1 + torch.arange(rows) * STEP


def install(monkeypatch: pytest.MonkeyPatch, scale: Scale, seen: list[int] | None = None) -> None:
    """Let torch compute products so. `seen` collects the numbers of rows asked for."""
    mm, bmm = torch.mm, torch.bmm

    def rowwise(left: Tensor, right: Tensor) -> Tensor:
        """[..., rows, inner] times [..., inner, columns], in a way that cannot depend on the number of rows."""
        if seen is not None:
            seen.append(left.shape[-2])
        product = mm if left.dim() == 2 else bmm
        rows = [product(left[..., at : at + 1, :].contiguous(), right) for at in range(left.shape[-2])]
        return torch.cat(rows, -2) * scale(left.shape[-2])[:, None]

    def batched(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        product = rowwise(left, right)
        return product if out is None else out.copy_(product)

    monkeypatch.setattr(torch, "mm", rowwise)
    monkeypatch.setattr(torch, "bmm", batched)
