"""What launchers share: checks whose errors name the argument, and how kernels are run. Imports without Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rackserve.base.errors import InvariantError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Number formats that activations may have; kernels compute in float32 where they do not multiply matrices."""

EXACT = {"enable_fp_fusion": False}
"""Launch options of kernels that must round where the reference rounds: no multiply-add in one."""


def check(name: str, tensor: Tensor, dtypes: torch.dtype | Sequence[torch.dtype], shape: Sequence[int | None]) -> None:
    """InvariantError, naming `name`, unless `tensor` has one of `dtypes`, the shape (None: any size) and lies dense."""
    check_strided(name, tensor, dtypes, shape)
    if not tensor.is_contiguous():
        raise InvariantError(f"{name} has strides {tuple(tensor.stride())}; make it contiguous")


def check_strided(name: str, tensor: Tensor, dtypes: torch.dtype | Sequence[torch.dtype], shape: Sequence[int | None]) -> None:
    """The same for a tensor of which only the last dimension must be dense, such as part of an arena's blocks."""
    wanted = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dtype not in wanted:
        raise InvariantError(f"{name} is {tensor.dtype}; give it as {' or '.join(str(dtype) for dtype in wanted)}")
    if tensor.dim() != len(shape) or any(size is not None and size != tensor.shape[at] for at, size in enumerate(shape)):
        raise InvariantError(f"{name} is {tuple(tensor.shape)}; its shape must be {shape_text(shape)}")
    if tensor.numel() and tensor.stride(-1) != 1:
        raise InvariantError(f"{name} has strides {tuple(tensor.stride())}; its last dimension must lie dense")


def shape_text(shape: Sequence[int | None]) -> str:
    """A shape as people write it, `*` for any size."""
    return f"({', '.join('*' if size is None else str(size) for size in shape)})"


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`: what blocks of a kernel must measure."""
    return 1 << max(size - 1, 0).bit_length()
