"""Residual streams (mHC): a sublayer's result goes into the streams, and out of them come the next sublayer's input and mix.

The streams are read once and written once per sublayer: while a piece of them is at hand it is expanded, collapsed with weights
known already, and multiplied for the next mix. A second kernel adds the pieces up, in order, into the mix and the normed input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.kernels.triton.launch import EXACT, FLOATS, check, power_of_two

ROWS = 16
"""Rows of one program."""

PIECE = 64
"""Channels of one program."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights of one sublayer, float32: `pre` [T, n] to collapse, `post` [T, n], `comb` [T, source, target]."""

    pre: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True, slots=True)
class Mixing:
    """What a sublayer's mix is made with, float32.

    fn [2 n + n * n, n * d] as in a checkpoint; scale [3] and base [2 n + n * n]; `iterations` of Sinkhorn's method.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    iterations: int
    hc_eps: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Passed:
    """Streams [T, n, d] after a sublayer, the next one's normed input [T, d], both of the streams' type, and its mix."""

    streams: Tensor
    x: Tensor
    mix: Mix | None


def advance(
    streams: Tensor, y: Tensor | None, mix: Mix | None, pre: Tensor, weight: Tensor | None, eps: float, mixing: Mixing | None
) -> Passed:
    """Expand `y` [T, d] into `streams` [T, n, d] by `mix`, collapse by `pre` [T, n], normalise, and mix for what comes next.

    streams and y float32, bf16 or fp16. Without `y` (before the first layer) the streams stay as they are; without `weight`
    float32 [d] (after the last layer) the input is not normalised; without `mixing` there is no mix.
    n must be a power of two. InvariantError for other shapes.
    Reads and writes 2 n d values a row, and d twice for the input; `fn` once per 16 rows; moves 4 * (2 n + n * n + 2) bytes a
    row and 64 channels for the pieces.
    """
    count, n, d = streams.shape
    _check(streams, y, mix, pre, weight, mixing)
    pieces, kinds = -(-d // PIECE), 2 * n + n * n
    after = torch.empty_like(streams) if y is not None else streams
    collapsed = torch.empty(count, d, dtype=torch.float32, device=streams.device)
    parts = torch.empty(pieces, count, kinds + 2, dtype=torch.float32, device=streams.device)
    x = torch.empty(count, d, dtype=streams.dtype, device=streams.device)
    new = Mix(*(torch.empty(count, *shape, dtype=torch.float32, device=streams.device) for shape in ((n,), (n,), (n, n))))
    if not count:
        return Passed(after, x, None if mixing is None else new)
    post, comb = (mix.post, mix.comb) if mix is not None else (pre, pre)
    _advance[(-(-count // ROWS), pieces)](
        streams, streams if y is None else y, post, comb, pre, parts if mixing is None else mixing.fn, after, collapsed, parts,
        count, N=n, DIM=d, KINDS=kinds, WIDE_KINDS=max(16, power_of_two(kinds)), ROWS=ROWS, PIECE=PIECE,
        EXPAND=y is not None, MIX=mixing is not None, num_warps=4, **EXACT,
    )  # fmt: skip
    scale, base = (mixing.scale, mixing.base) if mixing is not None else (parts, parts)
    iterations, hc_eps, norm_eps = (mixing.iterations, mixing.hc_eps, mixing.norm_eps) if mixing is not None else (0, 0.0, 0.0)
    _finish[(count,)](
        parts, collapsed, parts if weight is None else weight, scale, base, x, new.pre, new.post, new.comb, count, eps, hc_eps,
        norm_eps, N=n, DIM=d, KINDS=kinds, PIECES=pieces, ITERATIONS=iterations, BLOCK=min(1024, power_of_two(d)),
        NORM=weight is not None, MIX=mixing is not None, num_warps=4, **EXACT,
    )  # fmt: skip
    return Passed(after, x, None if mixing is None else new)


def _check(
    streams: Tensor, y: Tensor | None, mix: Mix | None, pre: Tensor, weight: Tensor | None, mixing: Mixing | None
) -> None:
    count, n, d = streams.shape
    check("streams", streams, FLOATS, (None, None, None))
    check("pre", pre, torch.float32, (count, n))
    if n != power_of_two(n):
        raise InvariantError(f"there are {n} streams; these kernels need a power of two")
    if (y is None) != (mix is None):
        raise InvariantError("y and mix belong together: give both or neither")
    if y is not None and mix is not None:
        check("y", y, FLOATS, (count, d))
        check("post", mix.post, torch.float32, (count, n))
        check("comb", mix.comb, torch.float32, (count, n, n))
    if weight is not None:
        check("weight", weight, torch.float32, (d,))
    if mixing is not None:
        check("fn", mixing.fn, torch.float32, (2 * n + n * n, n * d))
        check("scale", mixing.scale, torch.float32, (3,))
        check("base", mixing.base, torch.float32, (2 * n + n * n,))


@triton.jit
def _advance(
    streams, y, post, comb, pre, fn, after, collapsed, parts, count,
    N: tl.constexpr, DIM: tl.constexpr, KINDS: tl.constexpr, WIDE_KINDS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
    EXPAND: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    channel, kind = piece * PIECE + tl.arange(0, PIECE), tl.arange(0, WIDE_KINDS)
    there = row < count
    inside = there[:, None] & (channel < DIM)[None]
    begin = (row * N * DIM)[:, None] + channel[None]
    squares = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PIECE], tl.float32)
    products = tl.zeros([ROWS, WIDE_KINDS], tl.float32)
    for target in tl.static_range(N):
        if EXPAND:
            mixed = tl.zeros([ROWS, PIECE], tl.float32)
            for source in tl.static_range(N):
                share = tl.load(comb + (row * N + source) * N + target, mask=there, other=0.0)
                mixed += share[:, None] * tl.load(streams + begin + source * DIM, mask=inside, other=0.0).to(tl.float32)
            result = tl.load(y + (row * DIM)[:, None] + channel[None], mask=inside, other=0.0).to(tl.float32)
            h = (tl.load(post + row * N + target, mask=there, other=0.0)[:, None] * result + mixed).to(after.dtype.element_ty)
            tl.store(after + begin + target * DIM, h, mask=inside)
        else:
            h = tl.load(streams + begin + target * DIM, mask=inside, other=0.0)
        h = h.to(tl.float32)
        sums += tl.load(pre + row * N + target, mask=there, other=0.0)[:, None] * h
        if MIX:
            squares += tl.sum(h * h, 1)
            matrix = tl.load(
                fn + kind[None] * (N * DIM) + target * DIM + channel[:, None],
                mask=(kind < KINDS)[None] & (channel < DIM)[:, None], other=0.0,
            )  # fmt: skip
            products = tl.dot(h, matrix, products, input_precision="ieee")
    tl.store(collapsed + (row * DIM)[:, None] + channel[None], sums, mask=inside)
    to = parts + (piece * count + row) * (KINDS + 2)
    if MIX:
        tl.store(to[:, None] + kind[None], products, mask=there[:, None] & (kind < KINDS)[None])
        tl.store(to + KINDS, squares, mask=there)
    tl.store(to + KINDS + 1, tl.sum(sums * sums, 1), mask=there)


@triton.jit
def _finish(
    parts, collapsed, weight, scale, base, x, pre, post, comb, count, eps, hc_eps, norm_eps,
    N: tl.constexpr, DIM: tl.constexpr, KINDS: tl.constexpr, PIECES: tl.constexpr, ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, N)
    pair = 2 * N + stream[:, None] * N + stream[None]
    first, second = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    grid = tl.zeros([N, N], tl.float32)
    squares, own = 0.0, 0.0
    for piece in range(PIECES):
        at = parts + (piece * count + row) * (KINDS + 2)
        own += tl.load(at + KINDS + 1)
        if MIX:
            squares += tl.load(at + KINDS)
            first += tl.load(at + stream)
            second += tl.load(at + N + stream)
            grid += tl.load(at + pair)
    if MIX:
        root = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, N * DIM * 1.0) + norm_eps))
        a = _sigmoid(tl.fma(first * root, tl.load(scale), tl.load(base + stream))) + hc_eps
        b = 2.0 * _sigmoid(tl.fma(second * root, tl.load(scale + 1), tl.load(base + N + stream)))
        c = tl.fma(grid * root, tl.load(scale + 2), tl.load(base + pair))
        c = tl.exp(c - tl.max(c, 1)[:, None])
        c = tl.div_rn(c, tl.sum(c, 1)[:, None]) + hc_eps
        c = tl.div_rn(c, tl.sum(c, 0)[None] + hc_eps)
        for _ in range(ITERATIONS - 1):
            c = tl.div_rn(c, tl.sum(c, 1)[:, None] + hc_eps)
            c = tl.div_rn(c, tl.sum(c, 0)[None] + hc_eps)
        tl.store(pre + row * N + stream, a)
        tl.store(post + row * N + stream, b)
        tl.store(comb + row * N * N + pair - 2 * N, c)
    factor = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(own, DIM * 1.0) + eps))
    for begin in range(0, DIM, BLOCK):
        channel = begin + tl.arange(0, BLOCK)
        values = tl.load(collapsed + row * DIM + channel, mask=channel < DIM, other=0.0)
        if NORM:
            values = tl.load(weight + channel, mask=channel < DIM, other=0.0) * (values * factor)
        tl.store(x + row * DIM + channel, values.to(x.dtype.element_ty), mask=channel < DIM)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))
