"""The indexer's scores: how much each query wants each compressed row, by a few small heads.

A selection is `scores`, then `selection.select`. The layer that publishes candidates also takes `block_scores` of its own and
selects blocks; later layers score the rows of those blocks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.kernels.triton.launch import FLOATS, check, check_strided, power_of_two
from rackserve.kernels.triton.numbers import fp4_rows
from rackserve.kernels.triton.rows import row_bytes

TILE = 128
"""Keys in one product."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Index keys of sequences in an arena.

    cache      uint8 [blocks, rows, fp4 row bytes], blocks any number of bytes apart
    tables     int32 [sequences, most blocks]: each sequence's blocks
    sequences  int32 [n]: per query, its row of `tables`
    visible    int32 [n]: per query, how many rows it may read
    """

    cache: Tensor
    tables: Tensor
    sequences: Tensor
    visible: Tensor


def scores(queries: Tensor, weights: Tensor, keys: Keys, width: int) -> Tensor:
    """Sum over heads of weight times relu(query . key), for rows 0 to width - 1: float32 [n, width], -inf beyond `visible`.

    queries [n, heads, dim] float32, bf16 or fp16, rounded to fp4 already (so exact in any of them); weights float32 [n, heads].
    `width` must be at least the largest `visible`, which lives on the device. InvariantError for other shapes.
    Reads 68 bytes a key of 128 channels, and writes 4.
    """
    return _scores(queries, weights, keys, keys.visible[:, None], width, 0)


def candidate_scores(queries: Tensor, weights: Tensor, keys: Keys, blocks: Tensor, size: int) -> Tensor:
    """The same of the rows in candidate blocks alone: float32 [n, most * size], -inf where there is no such row.

    blocks int32 [n, most]: numbers of blocks of `size` rows, ascending, below 0 for none (`select` of `block_scores`).
    """
    check("blocks", blocks, torch.int32, (len(queries), None))
    return _scores(queries, weights, keys, blocks, blocks.shape[1] * size, size)


def block_scores(scores: Tensor, visible: Tensor, size: int) -> Tensor:
    """The best score in each block of `size` rows, infinite for the block with the newest visible row: float32 [n, blocks].

    scores float32 [n, width], -inf beyond `visible` int32 [n]. Reads every score once.
    """
    count, width = scores.shape
    check("scores", scores, torch.float32, (None, None))
    check("visible", visible, torch.int32, (count,))
    blocks = -(-width // size)
    out = torch.empty(count, blocks, dtype=torch.float32, device=scores.device)
    if out.numel():
        wide = power_of_two(size)
        _block_scores[(count, -(-blocks // TILE))](
            scores, visible, out, width, blocks, SIZE=size, WIDE=wide, TILE=TILE, num_warps=4
        )
    return out


def _scores(queries: Tensor, weights: Tensor, keys: Keys, blocks: Tensor, width: int, size: int) -> Tensor:
    count, heads, dim = queries.shape
    check("queries", queries, FLOATS, (None, None, dim))
    check("weights", weights, torch.float32, (count, heads))
    check_strided("cache", keys.cache, torch.uint8, (None, None, row_bytes("index", dim)))
    check("tables", keys.tables, torch.int32, (None, None))
    check("sequences", keys.sequences, torch.int32, (count,))
    check("visible", keys.visible, torch.int32, (count,))
    if dim % 32:
        raise InvariantError(f"queries have {dim} channels; give a multiple of 32")
    out = torch.empty(count, width, dtype=torch.float32, device=queries.device)
    if out.numel():
        _score[(count, -(-width // TILE))](
            queries, weights, keys.cache, keys.tables, keys.sequences, keys.visible, blocks, out, keys.cache.stride(0),
            keys.tables.shape[1], blocks.shape[1], width, HEADS=heads, DIM=dim, CACHE_ROWS=keys.cache.shape[1], SIZE=size,
            TALL=max(16, power_of_two(heads)), WIDE=power_of_two(dim), TILE=TILE, WIDEN=triton.knobs.runtime.interpret,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _score(
    queries, weights, cache, tables, sequences, visible, blocks, out, cache_stride, most_blocks, most_candidates, width,
    HEADS: tl.constexpr, DIM: tl.constexpr, CACHE_ROWS: tl.constexpr, SIZE: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    seen = tl.load(visible + query)
    if SIZE == 0:
        row = place
    else:
        block = tl.load(blocks + query * most_candidates + place // SIZE, mask=place < width, other=-1)
        row = tl.where(block >= 0, block * SIZE + place % SIZE, -1)
    there = (place < width) & (row >= 0) & (row < seen)
    total = tl.full([TILE], -float("inf"), tl.float32)
    if tl.max(there.to(tl.int32), 0) > 0:
        head, channel = tl.arange(0, TALL), tl.arange(0, WIDE)
        inside = (head < HEADS)[:, None] & (channel < DIM)[None]
        q = tl.load(queries + (query * HEADS + head[:, None]) * DIM + channel[None], mask=inside, other=0.0)
        if WIDEN:  # the interpreter multiplies bf16 wrongly
            q = q.to(tl.float32)
        table = tables + tl.load(sequences + query).to(tl.int64) * most_blocks
        at = tl.load(table + row // CACHE_ROWS, mask=there, other=0).to(tl.int64)
        base = cache + at * cache_stride + (row % CACHE_ROWS).to(tl.int64) * (DIM // 2 + DIM // 32)
        keys = fp4_rows(base, there, DIM, TILE, WIDE).to(q.dtype)
        dots = tl.dot(keys, tl.trans(q), input_precision="ieee")
        weight = tl.load(weights + query * HEADS + head, mask=head < HEADS, other=0.0)
        total = tl.where(there, tl.sum(tl.maximum(dots, 0.0) * weight[None], 1), total)
    tl.store(out + query * width + place, total, mask=place < width)


@triton.jit
def _block_scores(scores, visible, out, width, blocks, SIZE: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    block, lane = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, WIDE)
    row = block[:, None] * SIZE + lane[None]
    inside = (lane < SIZE)[None] & (row < width)
    best = tl.max(tl.load(scores + query * width + row, mask=inside, other=-float("inf")), 1)
    seen = tl.load(visible + query)
    newest = (seen > 0) & (block == (seen - 1) // SIZE)
    tl.store(out + query * blocks + block, tl.where(newest, float("inf"), best), mask=block < blocks)
