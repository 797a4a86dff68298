"""Triton's interpreter, which runs kernels on the CPU: it must be chosen before Triton is imported. Outputs begin as poison."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.kernels.fence import Fence
from tests.kernels.triton import drawn

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _fenced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What kernels write to holds NaN before, and nothing lies behind it; what was written in front of it is an error."""

    def like(tensor: Tensor, *shape: int, dtype: torch.dtype | None = None, device: object = None) -> Tensor:
        return drawn.empty(*shape or tensor.shape, dtype=dtype or tensor.dtype)

    drawn.Current.fence = Fence()
    monkeypatch.setattr(torch, "empty", drawn.empty)
    monkeypatch.setattr(torch, "empty_like", like)
    monkeypatch.setattr(Tensor, "new_empty", like)
    yield
    drawn.Current.fence.check()
