from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.model.deepseek_v41.attention import attend
from rackserve.model.deepseek_v41.rounding import pack_fp4_fine, pack_fp8, unpack_fp4_fine, unpack_fp8
from rackserve.model.products import Products
from tests.kernels.triton.drawn import ending, fenced, noise, permuted, poisoned

attention = pytest.importorskip("rackserve.kernels.triton.attention")

BLOCK_ROWS = 4
WAYS = pytest.mark.parametrize("way", ["decode", "prefill"])


class Case:
    """Ragged sequences in poisoned caches, what a query reads of them, and the reference's answer."""

    def __init__(
        self, lengths: list[int], heads: int, dim: int, window: int, topk: int, capacity: int, firsts: list[int]
    ) -> None:
        count = len(lengths)
        self.queries, self.sink = noise(count, heads, dim), noise(heads, seed=1)
        rings = poisoned(count + 1, capacity, dim + dim // 32)
        blocks = max(-(-length // BLOCK_ROWS) for length in lengths)
        arena = poisoned(count * blocks + 2, BLOCK_ROWS * (dim // 2 + dim // 16) + 40)
        main = arena[:, 40:].unflatten(1, (BLOCK_ROWS, -1))
        longest = lengths.index(max(lengths))
        tables = permuted(count * blocks + 2)[: count * blocks].view(count, blocks)
        tables = fenced(ending(tables, count * blocks + 1, longest, (lengths[longest] - 1) // BLOCK_ROWS).int())
        slots, selected = (
            fenced(ending(permuted(count + 1)[:count], count, longest).int()),
            torch.full((count, topk), -1, dtype=torch.int32),
        )
        near, far = torch.zeros(count, window, dim), torch.zeros(count, topk, dim)
        for number, length in enumerate(lengths):
            for position in range(max(firsts[number], length - capacity), length):
                row = pack_fp8(noise(1, dim, seed=100 * number + position))
                rings[slots[number], position % capacity] = row
                if position >= length - window:
                    near[number, position - length + window] = unpack_fp8(row, dim)
            rows = ending(permuted(length, seed=number)[: min(topk, length // 2)], length - 1, 0) if length > 1 else permuted(0)
            rows = rows.sort().values
            for place, row_number in enumerate(rows.tolist(), topk - len(rows)):
                row = pack_fp4_fine(noise(1, dim, seed=7000 + 100 * number + row_number))
                main[tables[number, row_number // BLOCK_ROWS], row_number % BLOCK_ROWS] = row
                far[number, place] = unpack_fp4_fine(row, dim)
                selected[number, place] = row_number
        at, first = torch.tensor(lengths) - 1, torch.tensor(firsts)
        seen = at[:, None] - window + 1 + torch.arange(window)
        self.near, self.far = near, far
        self.near_there, self.far_there = seen >= first[:, None].clamp(min=0), selected >= 0
        self.window = attention.Window(rings, slots, fenced(at.int()), fenced(first.int()), window)
        self.chosen = attention.Chosen(main, tables, fenced(torch.arange(count).int()), fenced(selected))

    def wanted(self, *, far: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
        rows = torch.cat((self.near, self.far), 1) if far else self.near
        there = torch.cat((self.near_there, self.far_there), 1) if far else self.near_there
        return attend(Products("single"), self.queries.to(dtype), rows.to(dtype), there, self.sink.to(dtype))

    def only(self, number: int) -> tuple[Tensor, Any, Any, Tensor]:
        """The arguments of one query alone."""
        part = slice(number, number + 1)
        window, chosen = self.window, self.chosen
        near = attention.Window(window.rings, window.slots[part], window.positions[part], window.first[part], window.size)
        far = attention.Chosen(chosen.main, chosen.tables, chosen.sequences[part], chosen.selected[part])
        return self.queries[part], near, far, self.sink


RAGGED = Case([1, 40, 7, 61], heads=5, dim=96, window=20, topk=150, capacity=24, firsts=[0, 0, 5, 60])
LONG = Case([90, 3], heads=4, dim=64, window=70, topk=45, capacity=70, firsts=[0, 0])


@WAYS
@pytest.mark.parametrize("case", [RAGGED, LONG], ids=["ragged", "long"])
def test_it_agrees_with_the_reference_in_float64(way: str, case: Case) -> None:
    out = getattr(attention, way)(case.queries, case.window, case.chosen, case.sink)
    assert torch.all((out - case.wanted()).abs() <= 2e-6)
    assert torch.all((out - case.wanted(dtype=torch.float32)).abs() <= 4e-6)


@WAYS
def test_a_layer_may_read_its_window_alone(way: str) -> None:
    out = getattr(attention, way)(LONG.queries, LONG.window, None, LONG.sink)
    assert torch.all((out - LONG.wanted(far=False)).abs() <= 2e-6)


@WAYS
def test_a_query_has_the_same_bits_alone_and_among_others(way: str) -> None:
    run = getattr(attention, way)
    together = run(RAGGED.queries, RAGGED.window, RAGGED.chosen, RAGGED.sink)
    for number in range(len(together)):
        assert torch.equal(run(*RAGGED.only(number))[0], together[number])


@WAYS
def test_more_heads_than_a_program_takes_and_served_number_formats(way: str) -> None:
    case = Case([20], heads=37, dim=32, window=8, topk=140, capacity=8, firsts=[0])
    out = getattr(attention, way)(case.queries.bfloat16(), case.window, case.chosen, case.sink)
    case.queries = case.queries.bfloat16().float()
    assert out.dtype == torch.bfloat16
    # the interpreter cuts float32 to bf16 where a GPU rounds
    assert torch.all((out.double() - case.wanted()).abs() <= 2.0**-7 * case.wanted().abs() + 1e-6)


@WAYS
def test_where_no_row_exists_the_result_is_zero(way: str) -> None:
    case = Case([10], heads=2, dim=32, window=4, topk=160, capacity=4, firsts=[10])
    case.chosen.selected.fill_(-1)
    assert torch.equal(getattr(attention, way)(case.queries, case.window, case.chosen, case.sink), torch.zeros(1, 2, 32))


def test_no_queries_and_wrong_shapes() -> None:
    queries, window, chosen, sink = RAGGED.only(0)
    empty = torch.empty(0, dtype=torch.int32)
    none = attention.Window(window.rings, empty, empty, empty, window.size)
    assert attention.decode(queries[:0], none, None, sink).shape == (0, 5, 96)
    with pytest.raises(InvariantError, match="rings hold 24 rows"):
        attention.prefill(queries, attention.Window(window.rings, window.slots, window.positions, window.first, 25), None, sink)
    with pytest.raises(InvariantError, match=r"selected is .*int64"):
        wrong = attention.Chosen(chosen.main, chosen.tables, chosen.sequences, chosen.selected.long())
        attention.decode(queries, window, wrong, sink)
