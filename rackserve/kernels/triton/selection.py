"""The best of many scores, by the model's rule for ties: the lowest row number wins."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.kernels.triton.launch import check

SCAN = 2048
"""Scores that a program looks at together."""


def select(scores: Tensor, count: int, blocks: Tensor | None = None, size: int = 1) -> Tensor:
    """The numbers of the `count` largest of each row of `scores`: int32 [n, count], ascending, the -1 of missing ones in front.

    scores float32 [n, width], -inf for what may not be chosen, none of them not a number; 0 and -0 are equal.
    blocks int32 [n, width / size]: if given, score i is that of row blocks[i / size] * size + i % size, and that is what is
    returned; ascending blocks keep the order.
    A program a row of scores: four counts of eight bits find the least score that is chosen, a last pass writes numbers. Reads
    20 bytes a score, most of them from the level-two cache. InvariantError for other shapes.
    """
    rows, width = scores.shape
    check("scores", scores, torch.float32, (None, None))
    if blocks is not None:
        check("blocks", blocks, torch.int32, (rows, None))
        if blocks.shape[1] * size != width:
            raise InvariantError(f"blocks name {blocks.shape[1]} x {size} rows, scores {width}; give one score a row")
    out = torch.empty(rows, count, dtype=torch.int32, device=scores.device)
    if out.numel():
        mapping = out if blocks is None else blocks
        _select[(rows,)](
            scores,
            mapping,
            out,
            width,
            width // size,
            COUNT=count,
            SIZE=size,
            MAPPED=blocks is not None,
            SCAN=SCAN,
            num_warps=8,
        )
    return out


@triton.jit
def _ordered(scores, place, width):
    """The scores as uint32 in the same order, and which of them may be chosen."""
    score = tl.load(scores + place, mask=place < width, other=-float("inf"))
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits ^ -0x80000000).to(tl.uint32, bitcast=True)
    return key, score > -float("inf")


@triton.jit
def _select(
    scores, blocks, out, width, num_blocks, COUNT: tl.constexpr, SIZE: tl.constexpr, MAPPED: tl.constexpr, SCAN: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * width
    blocks += row * num_blocks
    out += row * COUNT
    lane, digits = tl.arange(0, SCAN), tl.arange(0, 256)
    found = 0
    for begin in range(0, width, SCAN):
        _, alive = _ordered(scores, begin + lane, width)
        found += tl.sum(alive.to(tl.int32), 0)
    total = tl.minimum(found, COUNT)

    # The `total`-th largest key, eight bits at a time; `need` of those equal to it are chosen.
    need, least = total, tl.zeros([], tl.uint32)
    for step in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for begin in range(0, width, SCAN):
            key, alive = _ordered(scores, begin + lane, width)
            if step > 0:
                alive = alive & ((key >> (32 - 8 * step)) == least)
            counts += tl.histogram(((key >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=alive)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        hit = (above < need) & (above + counts >= need)
        least = (least << 8) | tl.sum(tl.where(hit, digits, 0), 0).to(tl.uint32)
        need -= tl.sum(tl.where(hit, above, 0), 0)

    for begin in range(0, COUNT - total, SCAN):
        tl.store(out + begin + lane, -1, mask=begin + lane < COUNT - total)
    taken, equals = COUNT - total, 0
    for begin in range(0, width, SCAN):
        place = begin + lane
        key, alive = _ordered(scores, place, width)
        equal = (alive & (key == least)).to(tl.int32)
        take = (alive & (key > least)) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= need))
        to = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        number = place
        if MAPPED:
            number = tl.load(blocks + place // SIZE, mask=take, other=0) * SIZE + place % SIZE
        tl.store(out + to, number, mask=take)
        taken += tl.sum(take.to(tl.int32), 0)
        equals += tl.sum(equal, 0)
