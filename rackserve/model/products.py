"""Matrix products whose rows do not depend on the rows beside them, whatever library computes them.

A library may add in another order for another number of rows, or for the rows that are left over at an edge. MKL does so with
AVX2, for example, and not with AVX-512. So it is tried with the shapes of the model at hand when that is loaded, and where it
happens, every product is computed in pieces of one constant shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["direct", "tiled", "single"]

MODES: tuple[Mode, ...] = ("direct", "tiled", "single")
"""Products as they come, in tiles of TILE_ROWS rows, or row by row; the quickest first."""

TILE_ROWS = 16

MIN_ROWS = 3
"""Products with fewer rows take another path in the library (that of a vector), which rounds differently."""

ROW_COUNTS = (MIN_ROWS, 5, 8, 17, 33, 64, 130, 256)
"""Numbers of rows that are tried. One of each remainder that kernels of 4, 6, 8 and 16 rows treat apart, and both below and
above the sizes at which libraries begin to copy and to cut."""

TRIAL_WORK = 1 << 30
"""Multiplications in the largest trial of one matrix: bounds the time to load."""


class Products:
    """Products in one of MODES. In "direct" mode `left` must have at least MIN_ROWS rows."""

    __slots__ = ("_tile", "mode")

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._tile = TILE_ROWS if mode == "tiled" else 1

    def mm(self, left: Tensor, right: Tensor) -> Tensor:
        """`left` [rows, inner] times `right` [inner, columns], both float32."""
        if self.mode != "direct":
            out = left.new_empty(len(left), right.shape[1])
            self._tiles(torch.mm, left, right, out)
            return out
        largest = _row_counts(right)[-1]
        if len(left) <= largest:
            return torch.mm(left, right)
        # More rows than were tried: pieces of nearly equal size, none of them small.
        return torch.cat([torch.mm(part, right) for part in left.tensor_split(-(-len(left) // largest))])

    def bmm(self, left: Tensor, right: Tensor, out: Tensor, group: int) -> None:
        """`left` [n * group, rows, inner] times `right` [n * group, inner, columns] into `out`; n may vary, `group` not."""
        if self.mode == "direct":
            torch.bmm(left, right, out=out)
            return
        for begin in range(0, len(left), group):
            part = slice(begin, begin + group)
            self._tiles(torch.bmm, left[part], right[part], out[part])

    def _tiles(self, product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, out: Tensor) -> None:
        """Rows of `left` through products of `_tile` rows each, the last filled up with zeros."""
        *batch, rows, inner = left.shape
        tile = left.new_empty(*batch, self._tile, inner)
        for begin in range(0, rows, self._tile):
            count = min(self._tile, rows - begin)
            tile[..., :count, :] = left[..., begin : begin + count, :]
            tile[..., count:, :] = 0.0
            out[..., begin : begin + count, :] = product(tile, right)[..., :count, :]


def choose(holds: Callable[[Products], bool]) -> Products:
    """The quickest way for which `holds`. Row by row needs no trial: the row itself is all that differs between products."""
    return next((products for mode in MODES[:-1] if holds(products := Products(mode))), Products(MODES[-1]))


def rows_agree(products: Products, matrix: Tensor) -> bool:
    """Whether rows times `matrix` [inner, columns] have the same bits among other numbers of rows and at other places."""
    *counts, largest = _row_counts(matrix)
    rows = torch.randn(largest, len(matrix), generator=torch.Generator().manual_seed(0))
    whole = products.mm(rows, matrix)
    parts = [_inside(largest, count) for count in counts]
    return all(torch.equal(products.mm(rows[part], matrix), whole[part]) for part in parts)


def batch_agrees(products: Products, left: Tensor, right: Tensor, group: int) -> bool:
    """The same of a whole `bmm`: whether its last group has the same bits alone and with fewer rows."""
    rows = left.shape[1]
    whole = left.new_empty(len(left), rows, right.shape[2])
    products.bmm(left, right, whole, group)
    for part in [slice(rows), *(_inside(rows, count) for count in ROW_COUNTS if count < rows)]:
        alone = torch.empty_like(whole[-group:, part])
        products.bmm(left[-group:, part].contiguous(), right[-group:], alone, group)
        if not torch.equal(alone, whole[-group:, part]):
            return False
    return True


def _inside(rows: int, count: int) -> slice:
    """`count` of `rows` rows, from an odd place in the middle: alone, each lies elsewhere and at another edge."""
    begin = (rows - count) // 2 | 1
    return slice(begin, begin + count)


def _row_counts(matrix: Tensor) -> list[int]:
    """Those of ROW_COUNTS to try with `matrix`, always some."""
    counts = [count for count in ROW_COUNTS if count * matrix.numel() <= TRIAL_WORK]
    return counts if len(counts) >= 4 else list(ROW_COUNTS[:4])
