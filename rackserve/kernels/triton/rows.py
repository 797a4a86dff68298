"""Rows on their way into a cache: normalised, rotated, rounded as the model rounds them, and stored, in one pass."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.kernels.triton.launch import EXACT, FLOATS, check, check_strided, power_of_two
from rackserve.kernels.triton.numbers import round_fp4, round_fp4_fine, round_fp8

RowKind = Literal["window", "index", "main"]

KINDS: dict[RowKind, int] = {"window": 0, "index": 1, "main": 2}
"""Rounded to fp8 with a power of two per 32 channels, fp4 with a power of two per 32, fp4 with an e4m3 scale per 16."""


def row_bytes(kind: RowKind, channels: int) -> int:
    """Bytes of a stored row."""
    return {
        "window": channels + channels // 32,
        "index": channels // 2 + channels // 32,
        "main": channels // 2 + channels // 16,
    }[kind]


def insert(
    x: Tensor,
    kind: RowKind,
    cache: Tensor,
    places: Tensor,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    rotation: tuple[Tensor, Tensor] | None = None,
    normed: Tensor | None = None,
) -> None:
    """Store each row of `x` [T, channels] (float32, bf16 or fp16) as a row of `kind` in `cache`.

    cache     uint8 [blocks, rows, row_bytes], blocks any number of bytes apart: a KV group of an arena, or windows by slot
    places    int64 [T]: block * rows + row; below 0 the row is dropped
    weight    float32 [channels]: if given, RMS-normalise by it and `eps` first
    rotation  cos and sin, float32 [T, pairs]: turn the last 2 * pairs channels, in adjacent pairs
    normed    [T, channels]: gets what was normalised, before the rotation
    Channels must be a multiple of 32. Two rows must not have one place. InvariantError for other shapes.
    Reads x, weight and rotation once, writes row_bytes per row (and normed): for 512 bf16 channels 1,024 + 528 bytes.
    """
    count, channels = x.shape
    size = row_bytes(kind, channels)
    pairs = 0 if rotation is None else rotation[0].shape[-1]
    check("x", x, FLOATS, (None, channels))
    check_strided("cache", cache, torch.uint8, (None, None, size))
    if cache.numel() and cache.stride(1) != size:
        raise InvariantError(f"cache has strides {tuple(cache.stride())}; the {size} bytes of its rows must follow each other")
    check("places", places, torch.int64, (count,))
    if channels % 32 or 2 * pairs > channels:
        raise InvariantError(f"x has {channels} channels, {2 * pairs} of them rotated; give a multiple of 32 that holds them")
    if weight is not None:
        check("weight", weight, torch.float32, (channels,))
    if normed is not None:
        check("normed", normed, FLOATS, (count, channels))
    for name, table in zip(("cos", "sin"), rotation or (), strict=False):
        check(f"rotation: {name}", table, torch.float32, (count, pairs))
    if not count:
        return
    cos, sin = rotation if rotation is not None else (x, x)
    _insert[(count,)](
        x, x if weight is None else weight, cos, sin, x if normed is None else normed, cache, places, cache.stride(0), eps,
        ROWS=cache.shape[1], DIM=channels, PAIRS=pairs, WIDE=power_of_two(channels), KIND=KINDS[kind], BYTES=size,
        NORM=weight is not None, KEEP=normed is not None, num_warps=max(1, min(8, channels // 512)), **EXACT,
    )  # fmt: skip


def pack_fp8(x: Tensor) -> Tensor:
    """`x` [T, channels] as products with quantised weights take it: uint8 [T, channels + channels / 32], rounded by Q1."""
    packed = torch.empty(len(x), 1, row_bytes("window", x.shape[1]), dtype=torch.uint8, device=x.device)
    insert(x, "window", packed, torch.arange(len(x), device=x.device))
    return packed[:, 0]


@triton.jit
def _insert(
    x, weight, cos, sin, normed, cache, places, block_stride, eps,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, BYTES: tl.constexpr,
    NORM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDE)
    inside = channel < DIM
    values = tl.load(x + row * DIM + channel, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.div_rn(tl.sum(values * values, 0), DIM * 1.0)
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        values = tl.load(weight + channel, mask=inside, other=0.0) * (values * scale)
    if KEEP:
        tl.store(normed + row * DIM + channel, values.to(normed.dtype.element_ty), mask=inside)
    if PAIRS > 0:
        values = _turned(values, cos + row * PAIRS, sin + row * PAIRS, DIM, PAIRS, WIDE)
    place = tl.load(places + row)
    if place >= 0:
        to = cache + (place // ROWS) * block_stride + (place % ROWS) * BYTES
        _store(values, to, DIM, WIDE, KIND)


@triton.jit
def _turned(values, cos, sin, DIM: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr):
    """`values` [WIDE] with the last PAIRS pairs of DIM turned."""
    pair = tl.arange(0, WIDE // 2)
    number = pair - (DIM // 2 - PAIRS)
    turns = (number >= 0) & (number < PAIRS)
    c = tl.load(cos + number, mask=turns, other=1.0)
    s = tl.load(sin + number, mask=turns, other=0.0)
    even, odd = tl.split(tl.reshape(values, [WIDE // 2, 2]))
    left = tl.where(turns, even * c - odd * s, even)
    right = tl.where(turns, even * s + odd * c, odd)
    return tl.reshape(tl.join(left, right), [WIDE])


@triton.jit
def _store(values, to, DIM: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr):
    """Round `values` [WIDE] and store the DIM of them at `to`, their scales behind them."""
    if KIND == 0:
        channel, group = tl.arange(0, WIDE), tl.arange(0, WIDE // 32)
        codes, scales = round_fp8(tl.reshape(values, [WIDE // 32, 32]))
        tl.store(to + channel, tl.reshape(codes, [WIDE]), mask=channel < DIM)
        tl.store(to + DIM + group, scales.to(tl.uint8), mask=group < DIM // 32)
    else:
        size: tl.constexpr = 32 if KIND == 1 else 16
        pair, group = tl.arange(0, WIDE // 2), tl.arange(0, WIDE // size)
        if KIND == 1:
            codes, scales = round_fp4(tl.reshape(values, [WIDE // size, size]))
        else:
            codes, scales = round_fp4_fine(tl.reshape(values, [WIDE // size, size]))
        low, high = tl.split(tl.reshape(codes, [WIDE // 2, 2]))
        tl.store(to + pair, (low | (high << 4)).to(tl.uint8), mask=pair < DIM // 2)
        tl.store(to + DIM // 2 + group, scales.to(tl.uint8), mask=group < DIM // size)
