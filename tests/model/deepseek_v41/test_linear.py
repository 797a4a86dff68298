from __future__ import annotations

import pytest
import torch

from rackserve.model.deepseek_v41.linear import Linear, choose_products
from rackserve.model.deepseek_v41.rounding import round_fp8
from rackserve.model.products import MODES, Products
from tests.model.deepseek_v41.golden import CONFIG, noise, weights

QUANTISED, PLAIN = "layers.2.attn.wq_a", "layers.2.ffn.gate"


@pytest.fixture(scope="module")
def products() -> Products:
    return choose_products(CONFIG, weights())


@pytest.mark.parametrize("name", [QUANTISED, PLAIN, "layers.3.ffn.experts.5.w2", "layers.1.engram.wkv"])
def test_it_is_the_product_with_the_stored_numbers(products: Products, name: str) -> None:
    matrix = weights().matrix(name)
    x = noise(9, matrix.shape[1])
    got = Linear(products, round_inputs=False)(x, matrix)
    assert torch.allclose(got, x @ matrix.right(), atol=1e-4)
    assert got.shape == (9, matrix.shape[0])


def test_inputs_are_rounded_for_quantised_weights_alone_and_only_if_asked(products: Products) -> None:
    on, off = Linear(products, round_inputs=True), Linear(products, round_inputs=False)
    for name in (QUANTISED, PLAIN):
        matrix = weights().matrix(name)
        x = noise(5, matrix.shape[1])
        assert torch.equal(on.plain(x, matrix), off(x, matrix))
        want = off.plain(round_fp8(x), matrix) if matrix.quantised else off.plain(x, matrix)
        assert torch.equal(on(x, matrix), want)
    assert weights().matrix(QUANTISED).quantised and not weights().matrix(PLAIN).quantised


@pytest.mark.parametrize("mode", MODES)
def test_no_row_and_single_rows_are_no_mistake(mode: str) -> None:
    linear = Linear(Products(mode), round_inputs=True)  # type: ignore[arg-type]
    matrix = weights().matrix(QUANTISED)
    x = noise(1, matrix.shape[1])
    assert linear(x[:0], matrix).shape == (0, matrix.shape[0])
    assert torch.allclose(linear(x, matrix), round_fp8(x) @ matrix.right(), atol=1e-4)


def test_a_row_has_the_same_bits_among_any_others(products: Products) -> None:
    linear = Linear(products, round_inputs=False)
    shapes = {matrix.shape: matrix for matrix in weights().matrices()}
    shapes.pop((1, CONFIG.hidden_size + CONFIG.dspark_markov_rank))  # confidence is a sum, not a product of this kind
    for shape, matrix in shapes.items():
        x = noise(130, shape[1])
        whole = linear(x, matrix)
        for begin, end in ((0, 1), (1, 3), (4, 9), (50, 117), (129, 130)):
            assert torch.equal(linear(x[begin:end], matrix), whole[begin:end]), shape
