"""Sparse attention: each query over a window of recent rows and the compressed rows chosen for it, in one softmax with a sink.

Rows are read as they are stored, and each is key and value of every head at once. `decode` shares a query's rows among programs
and joins their parts; `prefill`, with queries enough to fill a device, gives each query one program. Both read the same caches.
The two add in another order, so a query has not the same bits in both: which computes it must not depend on a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.kernels.triton.launch import FLOATS, check, check_strided, power_of_two
from rackserve.kernels.triton.numbers import fp4_fine_rows, fp8_rows
from rackserve.kernels.triton.rows import row_bytes

TILE = 32
"""Rows in one product."""

SPLIT_TILES = 4
"""Tiles that one program of `decode` reads: with 128 window rows and 512 chosen ones, five programs."""

MOST_HEADS = 32
"""Heads of one program: with 64 of 512 channels its sums would not fit in registers."""


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of recent positions, those of the queries themselves among them.

    rings       uint8 [slots, capacity, fp8 row bytes]; position p of a sequence is in its slot at p % capacity
    slots       int32 [n], per query
    positions   int32 [n], per query; a query reads `size` positions up to its own
    first       int32 [n]: positions before this one have no row
    size        positions that a query sees
    A pass of k positions of one sequence needs a capacity of size - 1 + k: all are inserted before any is read.
    """

    rings: Tensor
    slots: Tensor
    positions: Tensor
    first: Tensor
    size: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """Compressed rows, by number within a sequence.

    main      uint8 [blocks, rows, fine fp4 row bytes], blocks any number of bytes apart
    tables    int32 [sequences, most blocks]: each sequence's blocks
    sequences int32 [n]: per query, its row of `tables`
    selected  int32 [n, most]: row numbers in any order, below 0 for none
    """

    main: Tensor
    tables: Tensor
    sequences: Tensor
    selected: Tensor


def decode(queries: Tensor, window: Window, chosen: Chosen | None, sink: Tensor) -> Tensor:
    """Attention of queries [n, heads, dim] (float32, bf16 or fp16): [n, heads, dim] of the same type, zero where no row exists.

    sink float32 [heads]: a logit whose value is zero. Products are taken in the type of the queries and added up in float32;
    stored rows are exact in bf16. Channels must be a multiple of 32. InvariantError for other shapes.
    Reads each row once per 32 heads (528 and 288 bytes of 512 channels) and moves parts of 4 * heads * (dim + 2) bytes per
    query and split, twice.
    """
    splits = -(-_tiles(window, chosen) // SPLIT_TILES)
    if splits == 1 or not len(queries):
        return prefill(queries, window, chosen, sink)
    count, heads, dim = queries.shape
    parts = queries.new_empty(count, splits, heads, dim, dtype=torch.float32)
    peaks = queries.new_empty(count, splits, heads, dtype=torch.float32)
    sums = torch.empty_like(peaks)
    _launch(queries, window, chosen, sink, parts, peaks, sums, splits)
    out = torch.empty_like(queries)
    wide = power_of_two(dim)
    _join[(count, heads)](parts, peaks, sums, sink, out, HEADS=heads, DIM=dim, WIDE=wide, SPLITS=splits, num_warps=1)
    return out


def prefill(queries: Tensor, window: Window, chosen: Chosen | None, sink: Tensor) -> Tensor:
    """The same as `decode`, a program for each query and 32 heads, and no parts."""
    out = torch.empty_like(queries)
    _launch(queries, window, chosen, sink, out, out, out, 1)
    return out


def _tiles(window: Window, chosen: Chosen | None) -> int:
    return -(-window.size // TILE) + (0 if chosen is None else -(-chosen.selected.shape[1] // TILE))


def _launch(
    queries: Tensor, window: Window, chosen: Chosen | None, sink: Tensor, out: Tensor, peaks: Tensor, sums: Tensor, splits: int
) -> None:
    count, heads, dim = queries.shape
    _check(queries, window, chosen, sink)
    if not count:
        return
    tall = min(MOST_HEADS, max(16, power_of_two(heads)))
    main, tables, sequences, selected = (
        (window.rings, window.slots[:, None], window.slots, window.slots[:, None])
        if chosen is None
        else (chosen.main, chosen.tables, chosen.sequences, chosen.selected)
    )
    interpreted = triton.knobs.runtime.interpret
    _attend[(count, splits, -(-heads // tall))](
        queries, window.rings, window.slots, window.positions, window.first, main, tables, sequences, selected, sink,
        out, peaks, sums, window.rings.stride(0), main.stride(0), tables.shape[1], dim**-0.5,
        HEADS=heads, DIM=dim, CAPACITY=window.rings.shape[1], WINDOW=window.size,
        TOPK=0 if chosen is None else selected.shape[1],
        MAIN_ROWS=main.shape[1], SPLITS=splits, TILES=SPLIT_TILES if splits > 1 else _tiles(window, chosen), TALL=tall,
        WIDE=power_of_two(dim), ROWS=TILE, WIDEN=interpreted, num_warps=8, num_stages=2,
    )  # fmt: skip


def _check(queries: Tensor, window: Window, chosen: Chosen | None, sink: Tensor) -> None:
    count, heads, dim = queries.shape
    check("queries", queries, FLOATS, (None, None, dim))
    if dim % 32:
        raise InvariantError(f"queries have {dim} channels; give a multiple of 32")
    check_strided("rings", window.rings, torch.uint8, (None, None, row_bytes("window", dim)))
    for name, table in (("slots", window.slots), ("positions", window.positions), ("first", window.first)):
        check(name, table, torch.int32, (count,))
    check("sink", sink, torch.float32, (heads,))
    if window.size > window.rings.shape[1]:
        raise InvariantError(f"rings hold {window.rings.shape[1]} rows, a window has {window.size}; make them larger")
    if chosen is not None:
        check_strided("main", chosen.main, torch.uint8, (None, None, row_bytes("main", dim)))
        check("tables", chosen.tables, torch.int32, (None, None))
        check("sequences", chosen.sequences, torch.int32, (count,))
        check("selected", chosen.selected, torch.int32, (count, None))


@triton.jit
def _attend(
    queries, rings, slots, positions, first, main, tables, sequences, selected, sink, out, peaks, sums,
    ring_stride, main_stride, most_blocks, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, CAPACITY: tl.constexpr, WINDOW: tl.constexpr, TOPK: tl.constexpr,
    MAIN_ROWS: tl.constexpr, SPLITS: tl.constexpr, TILES: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    query, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, channel = tl.program_id(2) * TALL + tl.arange(0, TALL), tl.arange(0, WIDE)
    inside = (head < HEADS)[:, None] & (channel < DIM)[None]
    q = tl.load(queries + (query * HEADS + head[:, None]) * DIM + channel[None], mask=inside, other=0.0)
    if WIDEN:  # the interpreter multiplies bf16 wrongly
        q = q.to(tl.float32)
    peak = tl.full([TALL], -float("inf"), tl.float32)
    total = tl.zeros([TALL], tl.float32)
    acc = tl.zeros([TALL, WIDE], tl.float32)

    lane = tl.arange(0, ROWS)
    near: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    tiles: tl.constexpr = near + (TOPK + ROWS - 1) // ROWS
    begin, end = split * TILES, tl.minimum(split * TILES + TILES, tiles)
    position, earliest = tl.load(positions + query), tl.load(first + query)
    ring = rings + tl.load(slots + query).to(tl.int64) * ring_stride
    for tile in range(tl.minimum(begin, near), tl.minimum(end, near)):
        at = position - (WINDOW - 1) + tile * ROWS + lane
        there = (at <= position) & (at >= tl.maximum(earliest, 0))
        if tl.max(there.to(tl.int32), 0) > 0:
            rows = fp8_rows(ring + (at % CAPACITY).to(tl.int64) * (DIM + DIM // 32), there, DIM, ROWS, WIDE).to(q.dtype)
            peak, total, acc = _take(q, rows, there, peak, total, acc, scale)
    if TOPK > 0:
        table = tables + tl.load(sequences + query).to(tl.int64) * most_blocks
        for tile in range(tl.maximum(begin, near), tl.maximum(end, near)):
            number = (tile - near) * ROWS + lane
            row = tl.load(selected + query * TOPK + number, mask=number < TOPK, other=-1)
            there = row >= 0
            if tl.max(there.to(tl.int32), 0) > 0:
                block = tl.load(table + row // MAIN_ROWS, mask=there, other=0).to(tl.int64)
                base = main + block * main_stride + (row % MAIN_ROWS).to(tl.int64) * (DIM // 2 + DIM // 16)
                rows = fp4_fine_rows(base, there, DIM, ROWS, WIDE).to(q.dtype)
                peak, total, acc = _take(q, rows, there, peak, total, acc, scale)

    if SPLITS == 1:
        logit = tl.load(sink + head, mask=head < HEADS, other=0.0)
        top = tl.maximum(peak, logit)
        grown = tl.exp(peak - top)
        acc = acc * (grown / (total * grown + tl.exp(logit - top)))[:, None]
        to = out + (query * HEADS + head[:, None]) * DIM + channel[None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=inside)
    else:
        part = (query * SPLITS + split) * HEADS + head
        tl.store(peaks + part, peak, mask=head < HEADS)
        tl.store(sums + part, total, mask=head < HEADS)
        tl.store(out + part[:, None] * DIM + channel[None], acc, mask=inside)


@triton.jit
def _take(q, rows, there, peak, total, acc, scale):
    """Take `rows` into a running softmax: its largest logit, its sum and its values so far."""
    scores = tl.dot(q, tl.trans(rows), input_precision="ieee") * scale
    scores = tl.where(there[None], scores, -float("inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))  # some row is there, so it is finite
    shrink = tl.exp(peak - higher)
    shares = tl.exp(scores - higher[:, None])
    acc = tl.dot(shares.to(rows.dtype), rows, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(shares, 1), acc


@triton.jit
def _join(
    parts, peaks, sums, sink, out, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, WIDE)
    logit = tl.load(sink + head)
    top = logit
    for split in range(SPLITS):
        top = tl.maximum(top, tl.load(peaks + (query * SPLITS + split) * HEADS + head))
    total = tl.exp(logit - top)
    acc = tl.zeros([WIDE], tl.float32)
    for split in range(SPLITS):
        part = (query * SPLITS + split) * HEADS + head
        share = tl.exp(tl.load(peaks + part) - top)
        total += share * tl.load(sums + part)
        acc += share * tl.load(parts + part * DIM + channel, mask=channel < DIM, other=0.0)
    tl.store(out + (query * HEADS + head) * DIM + channel, (acc / total).to(out.dtype.element_ty), mask=channel < DIM)
