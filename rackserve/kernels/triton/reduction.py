"""The end of a row-parallel product: the sum of all devices' parts, what the row held before, and the normed next input.

Every device reads every part itself, in one kernel, in device order: so all hold the same bits. In symmetric memory parts are
read in place, over the link (`SymmetricParts`); without it they are gathered first (`GatheredParts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.kernels.triton.launch import EXACT, FLOATS, check, power_of_two


class Parts(Protocol):
    """Where devices put their parts for each other."""

    def shared(self, part: Tensor) -> tuple[Tensor, int]:
        """Make `part` known to all devices. Addresses of theirs, int64 [devices] in device order, and how many there are."""

    def done(self) -> None:
        """All have read: the next part may be written."""


class GatheredParts:
    """Parts copied to every device by `gather` (of torch.distributed, or anything else), which returns them in device order."""

    __slots__ = ("_gather", "_held")

    def __init__(self, gather: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self._gather = gather
        self._held: list[Tensor] = []

    def shared(self, part: Tensor) -> tuple[Tensor, int]:
        """InvariantError if what was gathered differs from `part` in shape or type."""
        self._held = [other.contiguous() for other in self._gather(part)]
        for number, other in enumerate(self._held):
            check(f"the part of device {number}", other, part.dtype, part.shape)
        return torch.tensor([other.data_ptr() for other in self._held], device=part.device), len(self._held)

    def done(self) -> None:
        self._held = []


class SymmetricParts:
    """Parts in symmetric memory of a process group of GPUs that reach each other's. Never run: no machine had two."""

    __slots__ = ("_addresses", "_buffer", "_handle")

    def __init__(self, group: dist.ProcessGroup, most: int, dtype: torch.dtype, device: torch.device) -> None:
        """Room for `most` values of `dtype`; a collective call of `group`. Raises what torch raises."""
        from torch.distributed import _symmetric_memory as symmetric

        self._buffer = symmetric.empty(most, dtype=dtype, device=device)
        self._handle: Any = symmetric.rendezvous(self._buffer, group)
        self._addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)

    def shared(self, part: Tensor) -> tuple[Tensor, int]:
        """InvariantError if `part` is larger than the room, or of another type."""
        if part.numel() > self._buffer.numel() or part.dtype != self._buffer.dtype:
            raise InvariantError(
                f"a part of {part.numel()} {part.dtype} does not fit {self._buffer.numel()} {self._buffer.dtype}; "
                "make more room"
            )
        self._buffer[: part.numel()].copy_(part.flatten())
        self._handle.barrier(channel=0)
        return self._addresses, len(self._addresses)

    def done(self) -> None:
        self._handle.barrier(channel=1)


def reduce_norm(
    part: Tensor, parts: Parts, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Sum of all devices' `part` [T, d] and `residual`, and that normalised: both [T, d] of the part's type.

    part and residual float32, bf16 or fp16 of one type; weight float32 [d], or None for no norm (then both are one tensor).
    Parts are added in float32 in device order, the residual last. Every device of the group must call it. InvariantError for
    other shapes. Reads T * d values per device, once, and of the residual; writes twice as many.
    """
    count, d = part.shape
    check("part", part, FLOATS, (None, None))
    if residual is not None:
        check("residual", residual, part.dtype, (count, d))
    if weight is not None:
        check("weight", weight, torch.float32, (d,))
    addresses, devices = parts.shared(part)
    total = torch.empty_like(part)
    normed = total if weight is None else torch.empty_like(part)
    if part.numel():
        wide = power_of_two(d)
        _reduce_norm[(count,)](
            addresses, part, total if residual is None else residual, addresses if weight is None else weight, total, normed,
            eps, DEVICES=devices, DIM=d, WIDE=wide, RESIDUAL=residual is not None, NORM=weight is not None,
            num_warps=max(1, min(16, wide // 512)), **EXACT,
        )  # fmt: skip
    parts.done()
    return total, normed


@triton.jit
def _reduce_norm(
    addresses, part, residual, weight, total, normed, eps,
    DEVICES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, WIDE)
    inside = channel < DIM
    at = tl.program_id(0).to(tl.int64) * DIM + channel
    values = tl.zeros([WIDE], tl.float32)
    for device in tl.static_range(DEVICES):
        theirs = tl.load(addresses + device).to(tl.pointer_type(part.dtype.element_ty))
        values += tl.load(theirs + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        values += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    if NORM:
        values = rounded.to(tl.float32)
        factor = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(values * values, 0), DIM * 1.0) + eps))
        scaled = tl.load(weight + channel, mask=inside, other=0.0) * (values * factor)
        tl.store(normed + at, scaled.to(normed.dtype.element_ty), mask=inside)
