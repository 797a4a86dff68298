from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu, softplus

from rackserve.model.deepseek_v41.pointwise import LANES, fused, sigmoid, steady, total
from tests.model.deepseek_v41.golden import noise

LENGTHS = (0, 1, 7, 31, LANES - 1, LANES, LANES + 1, 200)


@pytest.mark.parametrize("function", [silu, softplus, torch.exp, torch.sigmoid])
def test_a_value_has_the_same_bits_wherever_it_lies(function: object) -> None:
    x = noise(300, scale=4.0)
    whole = steady(function, x)  # type: ignore[arg-type]
    for begin in (0, 1, 5):
        for length in LENGTHS:
            part = x[begin : begin + length]
            assert torch.equal(steady(function, part), whole[begin : begin + length])  # type: ignore[arg-type]
    strided = torch.stack((x, -x), 1)[:, 0]
    assert torch.equal(steady(function, strided), whole)  # type: ignore[arg-type]
    assert torch.equal(steady(function, x.view(10, 30)), whole.view(10, 30))  # type: ignore[arg-type]


def test_a_sigmoid_is_right_to_the_last_places() -> None:
    x = noise(5000, scale=8.0)
    assert torch.allclose(sigmoid(x).double(), torch.sigmoid(x.double()), rtol=2e-7, atol=0)
    assert sigmoid(torch.tensor([-200.0, 200.0, 0.0])).tolist() == [0.0, 1.0, 0.5]
    assert torch.equal(sigmoid(x)[17:18], sigmoid(x[17:18]))


def test_a_sum_is_taken_from_first_to_last() -> None:
    x = torch.tensor([[1e8, 1.0, -1e8], [-1e8, 1e8, 1.0]])
    assert total(x, 1).tolist() == [[0.0], [1.0]]
    assert total(x, 0).shape == (1, 3)
    assert torch.allclose(total(noise(4, 3, 5), 1), noise(4, 3, 5).sum(1, keepdim=True))


def test_a_product_and_sum_is_rounded_once() -> None:
    x, scale = torch.tensor([1 + 2.0**-23]), torch.tensor([1 + 2.0**-23])
    base = -(x * scale)
    assert float(x * scale + base) == 0.0  # the product was rounded to what `base` takes away
    assert float(fused(x, scale, base)) == 2.0**-46
