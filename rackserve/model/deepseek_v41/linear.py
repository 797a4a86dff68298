"""Products with the model's matrices, such that a row's result does not depend on the rows beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.rounding import round_fp8
from rackserve.model.deepseek_v41.weights import Matrix, Weights
from rackserve.model.products import MIN_ROWS, Products, batch_agrees, choose, rows_agree


class Linear:
    """`round_inputs`: whether the inputs of quantised products are rounded to fp8, as kernels over the stored weights do."""

    __slots__ = ("products", "round_inputs")

    def __init__(self, products: Products, *, round_inputs: bool) -> None:
        self.products = products
        self.round_inputs = round_inputs

    def __call__(self, x: Tensor, matrix: Matrix) -> Tensor:
        """`x` [T, in] times the matrix [out, in]: [T, out]. Rounds `x` if the matrix is quantised and that is on."""
        return self.times(self.rounded(x) if matrix.quantised else x, matrix.right())

    def plain(self, x: Tensor, matrix: Matrix) -> Tensor:
        """The same, never rounded."""
        return self.times(x, matrix.right())

    def rounded(self, x: Tensor) -> Tensor:
        """`x` as a quantised product takes it."""
        return round_fp8(x) if self.round_inputs else x

    def times(self, x: Tensor, right: Tensor) -> Tensor:
        """`x` [T, in] times `right` [in, out], T may be 0."""
        rows = len(x)
        if not rows:
            return x.new_empty(0, right.shape[1])
        if rows < MIN_ROWS:
            x = torch.cat((x, x.new_zeros(MIN_ROWS - rows, x.shape[1])))
        return self.products.mm(x.contiguous(), right)[:rows]


def choose_products(config: DeepseekV41Config, weights: Weights) -> Products:
    """How to compute products here so that rows do not depend on each other: tried with one matrix of every shape in use."""
    shapes = {matrix.shape: matrix for matrix in weights.matrices() if matrix.shape[0] > 1}
    rights = [matrix.right() for matrix in shapes.values()]
    generator = torch.Generator().manual_seed(0)
    heads = len(weights.vector("layers.0.attn.attn_sink"))
    rows = config.sliding_window + config.index_topk
    queries = torch.randn(4, heads, config.head_dim, generator=generator)
    keys = torch.randn(4, config.head_dim, rows, generator=generator)
    shares = torch.rand(4, heads, rows, generator=generator)

    def holds(products: Products) -> bool:
        return (
            all(rows_agree(products, right) for right in rights)
            and batch_agrees(products, queries, keys, 1)
            and batch_agrees(products, shares, keys.transpose(1, 2).contiguous(), 1)
        )

    return choose(holds)
