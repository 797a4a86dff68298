from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rackserve.model.products import MIN_ROWS, MODES, ROW_COUNTS, TILE_ROWS, Mode, Products, batch_agrees, choose, rows_agree
from tests.model import libraries

GROUP = 2


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(derandomize=True, max_examples=40, deadline=None)
@given(mode=st.sampled_from(MODES), rows=st.integers(MIN_ROWS, 70), groups=st.integers(1, 3))
def test_in_every_mode_a_product_is_the_product(mode: Mode, rows: int, groups: int) -> None:
    left, right = draw(GROUP * groups, rows, 24), draw(GROUP * groups, 24, 20, seed=4)
    exact = torch.matmul(left.double(), right.double()).float()
    out = torch.full_like(exact, torch.nan)
    Products(mode).bmm(left, right, out, GROUP)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(Products(mode).mm(left[0], right[0]), exact[0])
    torch.testing.assert_close(Products(mode).mm(left[0], right[0].t().contiguous().t()), exact[0])


@pytest.mark.parametrize(
    ("library", "mode"),
    [(libraries.by_itself, "direct"), (libraries.by_count, "tiled"), (libraries.by_place, "single")],
)
def test_the_quickest_way_that_keeps_rows_apart_is_chosen(
    library: libraries.Scale, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.install(monkeypatch, library)
    pair = draw(6, 100, 8), draw(6, 8, 10)
    assert choose(lambda products: rows_agree(products, draw(24, 20))).mode == mode
    assert choose(lambda products: batch_agrees(products, *pair, GROUP)).mode == mode


@pytest.mark.parametrize(
    "scale",
    [
        lambda rows: 1 + (rows > 130) * 2**-20 * torch.ones(rows),
        lambda rows: 1 + (rows < 4) * 2**-20 * torch.ones(rows),
        lambda rows: 1 + 2**-20 * (torch.arange(rows) >= rows - rows % 6),
        lambda rows: 1 + 2**-20 * (torch.arange(rows) >= rows - rows % 16),
        lambda rows: 1 + 2**-20 * (torch.arange(rows) == rows - 1),
    ],
    ids=["many rows", "few rows", "kernels of 6", "kernels of 16", "last row"],
)
def test_a_library_that_treats_some_rows_apart_is_found_out(scale: libraries.Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.install(monkeypatch, scale)
    assert not rows_agree(Products("direct"), draw(24, 20))
    assert not batch_agrees(Products("direct"), draw(6, 140, 8), draw(6, 8, 10), GROUP)


def test_a_library_that_rounds_by_the_size_of_the_batch_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.bmm

    def bmm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        product = real(left, right) * (1 + len(left) * 2**-20)
        return product if out is None else out.copy_(product)

    monkeypatch.setattr(torch, "bmm", bmm)
    pair = draw(6, MIN_ROWS, 8), draw(6, 8, 10)
    assert not batch_agrees(Products("direct"), *pair, GROUP)
    assert choose(lambda products: batch_agrees(products, *pair, GROUP)).mode != "direct"


@pytest.mark.parametrize(("mode", "shape"), [("tiled", TILE_ROWS), ("single", 1)])
def test_a_mode_that_cuts_asks_for_one_shape_only(mode: Mode, shape: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    libraries.install(monkeypatch, libraries.by_itself, seen)
    out = torch.empty(6, 23, 10)
    Products(mode).mm(draw(23, 8), draw(8, 10))
    Products(mode).bmm(draw(6, 23, 8), draw(6, 8, 10), out, GROUP)
    assert set(seen) == {shape}


@pytest.mark.parametrize("rows", [256, 257, 511, 513, 770])
def test_no_product_has_more_rows_than_were_tried_or_fewer_than_the_least(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    libraries.install(monkeypatch, libraries.by_itself, seen)
    assert Products("direct").mm(draw(rows, 2), draw(2, 2)).shape == (rows, 2)
    assert sum(seen) == rows and max(seen) <= ROW_COUNTS[-1] and min(seen) >= ROW_COUNTS[-1] // 2


def test_a_large_matrix_is_tried_with_fewer_rows_and_used_with_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    libraries.install(monkeypatch, libraries.by_itself, seen)
    monkeypatch.setattr("rackserve.model.products.TRIAL_WORK", 64 * 20)
    matrix = draw(4, 5)
    assert rows_agree(Products("direct"), matrix) and max(seen) == 64
    seen.clear()
    Products("direct").mm(draw(100, 4), matrix)
    assert seen == [50, 50]
    monkeypatch.setattr("rackserve.model.products.TRIAL_WORK", 1)
    assert rows_agree(Products("direct"), matrix) and set(ROW_COUNTS[:4]) <= set(seen)
