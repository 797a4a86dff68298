"""Experts: grouped products of fp8 activations with fp4 weights, a gated unit between them, and the sum over a row's experts.

Rows are grouped by expert on the device, into tiles of one expert's rows, so weights are read once per TILE_ROWS rows of
their expert, and not at all if it has none. Products are `tl.dot_scaled`: native where a chip multiplies scaled fp8 by fp4
(sm_100), in bf16, which holds every scaled number exactly, where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.kernels.triton.launch import FLOATS, check, check_strided, power_of_two
from rackserve.kernels.triton.numbers import round_fp8
from rackserve.kernels.triton.rows import row_bytes

TILE_ROWS = 64
"""Rows of one tile. The same for few rows and many, so that a row's sums have one order."""

TILE_COLUMNS = 64
INNER = 128


@dataclass(frozen=True, slots=True)
class Fp4:
    """One matrix [out, in] per expert, as stored in checkpoints: uint8 pairs [E, out, in / 2], exponents [E, out, in / 32]."""

    pairs: Tensor
    exponents: Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """Assignments (row * top + place) grouped by expert, on the device.

    order    int32 [T * top]: assignments by expert, those without one last
    experts  int32 [tiles]: each tile's expert, -1 for a tile that is not needed
    first    int32 [tiles]: where in `order` its rows begin
    ends     int32 [E]: where in `order` an expert's rows end
    """

    order: Tensor
    experts: Tensor
    first: Tensor
    ends: Tensor


def group(chosen: Tensor, num_experts: int) -> Tiles:
    """Tiles of `chosen` int [T, top]: each row's experts, numbers from 0 to `num_experts` - 1 and any other for one elsewhere.

    In torch, without waiting for the device: there are as many tiles as could be needed.
    """
    flat = chosen.reshape(-1).long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts[:-1].cumsum(0)
    tiles = (counts[:-1] + TILE_ROWS - 1) // TILE_ROWS
    tile_ends = tiles.cumsum(0)
    most = min(num_experts, len(flat)) + len(flat) // TILE_ROWS
    number = torch.arange(most, device=flat.device)
    expert = torch.searchsorted(tile_ends, number, right=True).clamp(max=num_experts - 1)
    first = (ends - counts[:-1])[expert] + (number - (tile_ends - tiles)[expert]) * TILE_ROWS
    needed = number < tile_ends[-1]
    return Tiles(order.int(), torch.where(needed, expert, -1).int(), torch.where(needed, first, 0).int(), ends.int())


def mixture(
    x: Tensor, chosen: Tensor, weights: Tensor, w1: Fp4, w2: Fp4, w3: Fp4, limit: float, shared: Tensor | None = None
) -> Tensor:
    """The sum over each row's experts of expert(row), and of `shared`: float32 [T, hidden].

    x        uint8 [T, hidden + hidden / 32]: rows rounded to fp8, from `rows.pack_fp8`
    chosen   int [T, top]: experts, numbered as in the matrices; others are elsewhere and add nothing
    weights  float32 [T, top], which go in before the last product's rounding
    w1, w3   gate and up, [E, inner, hidden]; w2 down, [E, hidden, inner]
    limit    gates are cut there from above, ups from both sides
    shared   [T, hidden] float32, bf16 or fp16: added last
    hidden and inner must be multiples of 32. InvariantError for other shapes.
    Reads 3 * hidden * inner * 17 / 32 bytes per expert that has rows; moves per assignment its fp8 input, inner * 33 / 32
    bytes twice, and 4 * hidden bytes twice.
    """
    count, top = chosen.shape
    hidden, inner = w2.pairs.shape[1], w1.pairs.shape[1]
    _check(x, chosen, weights, (w1, w2, w3), shared)
    tiles = group(chosen, len(w1.pairs))
    between = torch.empty(count * top, row_bytes("window", inner), dtype=torch.uint8, device=x.device)
    each = torch.empty(count * top, hidden, dtype=torch.float32, device=x.device)
    out = torch.empty(count, hidden, dtype=torch.float32, device=x.device)
    if not count:
        return out
    sizes = {"TILE_ROWS": TILE_ROWS, "COLUMNS": TILE_COLUMNS, "INNER": INNER, "num_warps": 4, "num_stages": 3}
    num_tiles = len(tiles.experts)
    _gate_up[(num_tiles, -(-inner // TILE_COLUMNS))](
        x, x.stride(0), tiles.order, tiles.experts, tiles.first, tiles.ends, weights, w1.pairs, w1.exponents, w3.pairs,
        w3.exponents, between, limit, TOP=top, HIDDEN=hidden, WIDTH=inner, **sizes,
    )  # fmt: skip
    _down[(num_tiles, -(-hidden // TILE_COLUMNS))](
        between, tiles.order, tiles.experts, tiles.first, tiles.ends, w2.pairs, w2.exponents, each,
        HIDDEN=hidden, WIDTH=inner, **sizes,
    )  # fmt: skip
    block = min(1024, power_of_two(hidden))
    _sum[(count, -(-hidden // block))](
        each, chosen, out if shared is None else shared, out, len(w1.pairs), TOP=top, DIM=hidden, BLOCK=block,
        SHARED=shared is not None, num_warps=4,
    )  # fmt: skip
    return out


def _check(x: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[Fp4, Fp4, Fp4], shared: Tensor | None) -> None:
    count, top = chosen.shape
    experts, hidden = matrices[1].pairs.shape[:2]
    inner = matrices[0].pairs.shape[1]
    if hidden % 32 or inner % 32:
        raise InvariantError(f"experts are {inner} x {hidden}; both must be multiples of 32")
    check_strided("x", x, torch.uint8, (count, row_bytes("window", hidden)))
    check("chosen", chosen, (torch.int32, torch.int64), (count, None))
    check("weights", weights, torch.float32, (count, top))
    for name, matrix, shape in zip(
        ("w1", "w2", "w3"), matrices, ((inner, hidden), (hidden, inner), (inner, hidden)), strict=True
    ):
        check(f"{name}.pairs", matrix.pairs, torch.uint8, (experts, shape[0], shape[1] // 2))
        check(f"{name}.exponents", matrix.exponents, torch.uint8, (experts, shape[0], shape[1] // 32))
    if shared is not None:
        check("shared", shared, FLOATS, (count, hidden))


@triton.jit
def _product(
    acc, rows, there, pairs, exponents, column, begin, SIZE: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr
):  # fmt: skip
    """Add to `acc` the product of INNER channels of fp8 rows (pointers) with those of an expert's columns, from `begin` on."""
    at, pair, part = tl.arange(0, INNER), tl.arange(0, INNER // 2), tl.arange(0, INNER // 32)
    channel, scaled = begin + at, begin // 32 + part
    codes = tl.load(rows[:, None] + channel[None], mask=there[:, None] & (channel < WIDTH)[None], other=0)
    scales = tl.load(rows[:, None] + WIDTH + scaled[None], mask=there[:, None] & (scaled < WIDTH // 32)[None], other=0)
    inside = (column < SIZE)[:, None]
    packed = begin // 2 + pair
    left = tl.load(
        pairs + column[None] * (WIDTH // 2) + packed[:, None], mask=tl.trans(inside) & (packed < WIDTH // 2)[:, None], other=0
    )
    powers = tl.load(
        exponents + column[:, None] * (WIDTH // 32) + scaled[None], mask=inside & (scaled < WIDTH // 32)[None], other=0
    )
    return tl.dot_scaled(codes, scales, "e4m3", left, powers, "e2m1", acc)


@triton.jit
def _gate_up(
    x, x_stride, order, experts, first, ends, weights, gates, gate_exponents, ups, up_exponents, between, limit,
    TOP: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        place = tl.load(first + tl.program_id(0)).to(tl.int64) + tl.arange(0, TILE_ROWS)
        there = place < tl.load(ends + expert)
        assignment = tl.load(order + place, mask=there, other=0).to(tl.int64)
        rows = x + (assignment // TOP) * x_stride
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        pairs, powers = expert * WIDTH * (HIDDEN // 2), expert * WIDTH * (HIDDEN // 32)
        gate = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
        up = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
        for begin in range(0, HIDDEN, INNER):
            gate = _product(gate, rows, there, gates + pairs, gate_exponents + powers, column, begin, WIDTH, HIDDEN, INNER)
            up = _product(up, rows, there, ups + pairs, up_exponents + powers, column, begin, WIDTH, HIDDEN, INNER)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        weight = tl.load(weights + assignment, mask=there, other=0.0)
        inner = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up * weight[:, None]
        # groups of 32 columns, which have one scale, never cross programs
        codes, scales = round_fp8(tl.reshape(inner, [TILE_ROWS * COLUMNS // 32, 32]))
        codes, scales = tl.reshape(codes, [TILE_ROWS, COLUMNS]), tl.reshape(scales, [TILE_ROWS, COLUMNS // 32])
        to = between + place * (WIDTH + WIDTH // 32)
        group = tl.program_id(1) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
        tl.store(to[:, None] + column[None], codes, mask=there[:, None] & (column < WIDTH)[None])
        tl.store(to[:, None] + WIDTH + group[None], scales.to(tl.uint8), mask=there[:, None] & (group < WIDTH // 32)[None])


@triton.jit
def _down(
    between, order, experts, first, ends, downs, exponents, each,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        place = tl.load(first + tl.program_id(0)).to(tl.int64) + tl.arange(0, TILE_ROWS)
        there = place < tl.load(ends + expert)
        rows = between + place * (WIDTH + WIDTH // 32)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        pairs, powers = expert * HIDDEN * (WIDTH // 2), expert * HIDDEN * (WIDTH // 32)
        acc = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
        for begin in range(0, WIDTH, INNER):
            acc = _product(acc, rows, there, downs + pairs, exponents + powers, column, begin, HIDDEN, WIDTH, INNER)
        assignment = tl.load(order + place, mask=there, other=0).to(tl.int64)
        inside = there[:, None] & (column < HIDDEN)[None]
        tl.store(each + assignment[:, None] * HIDDEN + column[None], acc, mask=inside)


@triton.jit
def _sum(
    each, chosen, shared, out, num_experts, TOP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < DIM
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP):
        expert = tl.load(chosen + row * TOP + place)
        end = tl.where((expert >= 0) & (expert < num_experts), DIM, 0)  # nothing was computed for one elsewhere
        total += tl.load(each + (row * TOP + place) * DIM + channel, mask=channel < end, other=0.0)
    if SHARED:
        total += tl.load(shared + row * DIM + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * DIM + channel, total, mask=inside)
