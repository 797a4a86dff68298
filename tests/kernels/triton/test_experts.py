from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.moe import Expert
from rackserve.model.deepseek_v41.rounding import pack_fp8, round_fp8, unpack_fp8
from rackserve.model.products import Products
from tests.kernels.cpu.v41_matrices import fp4
from tests.kernels.triton.drawn import fenced, noise

experts = pytest.importorskip("rackserve.kernels.triton.experts")

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

LIMIT, EXPERTS, HIDDEN, INNER = 2.0, 5, 160, 96


class _Whole:
    """A matrix as the reference's `Expert` takes it."""

    quantised = True

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def right(self) -> Tensor:
        return self._matrix.t().contiguous()


def matrices(outputs: int, inputs: int, seed: int) -> tuple[Any, Tensor]:
    """One random matrix per expert, packed, and the float32 numbers it stands for."""
    rng = np.random.default_rng(seed)
    pairs, exponents, wide = zip(*(fp4(rng, outputs, inputs) for _ in range(EXPERTS)), strict=True)
    packed = experts.Fp4(fenced(torch.tensor(np.stack(pairs))), fenced(torch.tensor(np.stack(exponents))))
    return packed, torch.tensor(np.stack(wide))


W1, WIDE1 = matrices(INNER, HIDDEN, 1)
W2, WIDE2 = matrices(HIDDEN, INNER, 2)
W3, WIDE3 = matrices(INNER, HIDDEN, 3)


def drawn(count: int, top: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as packed, chosen experts (few of them favoured, one never chosen) and weights."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:top] for _ in range(count)])
    return (
        fenced(pack_fp8(noise(count, HIDDEN, seed=seed))),
        fenced(chosen),
        fenced(torch.rand(count, top, generator=generator)),
    )


def reference(packed: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The reference's own experts, row by row."""
    x, out = unpack_fp8(packed, HIDDEN), torch.zeros(len(packed), HIDDEN)
    for row in range(len(packed)):
        for place, number in enumerate(chosen[row].tolist()):
            if not 0 <= number < EXPERTS:
                continue
            expert = Expert.__new__(Expert)
            expert._limit, expert._linear = LIMIT, Linear(Products("single"), round_inputs=True)
            expert._w1, expert._w2, expert._w3 = (_Whole(wide[number]) for wide in (WIDE1, WIDE2, WIDE3))  # type: ignore[assignment]
            out[row] += expert(x[row : row + 1], weights[row : row + 1, place : place + 1])[0]
    return out


def in_double(packed: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same sums in float64, with the model's rounding between the products; and the size of what is added."""
    x, shape = unpack_fp8(packed, HIDDEN).double(), (len(packed), HIDDEN)
    out, size = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for row in range(len(packed)):
        for place, number in enumerate(chosen[row].tolist()):
            if 0 <= number < EXPERTS:
                gate = (x[row] @ WIDE1[number].double().T).clamp(max=LIMIT)
                up = (x[row] @ WIDE3[number].double().T).clamp(-LIMIT, LIMIT)
                inner = round_fp8((gate * gate.sigmoid() * up * weights[row, place]).float()[None])[0].double()
                out[row] += inner @ WIDE2[number].double().T
                size[row] += inner.abs() @ WIDE2[number].double().T.abs()
    return out, size


def run(packed: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
    return experts.mixture(packed, chosen, weights, W1, W2, W3, LIMIT, shared)


@pytest.mark.parametrize(("count", "top"), [(1, 1), (3, 2), (67, 2)])
def test_it_agrees_with_float64_and_the_reference(count: int, top: int) -> None:
    arguments = drawn(count, top)
    found, (wanted, size) = run(*arguments), in_double(*arguments)
    # a value next to a rounding's bound may fall on its other side: that moves a row by a sixteenth of one of its terms
    off = (found - wanted).abs() > 1e-5 * size
    assert off.float().mean() < 0.01
    assert torch.all((found - wanted).abs() <= 0.02 * size)
    if count < 10:
        assert torch.allclose(found, reference(*arguments), rtol=1e-4, atol=1e-4 * float(size.max()))


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    packed, chosen, weights = drawn(67, 2)
    together = run(packed, chosen, weights)
    for row in (0, 66):
        part = slice(row, row + 1)
        assert torch.equal(run(packed[part], chosen[part], weights[part])[0], together[row])


def test_experts_elsewhere_add_nothing_and_the_shared_one_is_added_last() -> None:
    packed, chosen, weights = drawn(6, 3, seed=4)
    chosen[:, 1] = EXPERTS
    chosen[2] = -1
    shared = noise(6, HIDDEN, seed=9)
    alone = run(packed, chosen, weights)
    assert torch.equal(alone[2], torch.zeros(HIDDEN))
    assert torch.equal(run(packed, chosen.int(), weights, shared), alone + shared)
    without = torch.stack((chosen[:, 0], chosen[:, 2]), 1)
    assert torch.equal(run(packed, without, weights[:, ::2].contiguous()), alone)


def test_every_assignment_is_in_one_tile_of_its_expert() -> None:
    chosen = torch.cat([torch.zeros(130, 1), torch.full((1, 1), 4), torch.full((3, 1), -1), torch.full((64, 1), 2)]).long()
    tiles = experts.group(chosen, EXPERTS)
    found: list[int] = []
    for expert, first in zip(tiles.experts.tolist(), tiles.first.tolist(), strict=True):
        if expert >= 0:
            members = tiles.order[first : min(first + experts.TILE_ROWS, int(tiles.ends[expert]))].tolist()
            assert members
            assert all(chosen[member, 0] == expert for member in members)
            found += members
    assert sorted(found) == [number for number in range(len(chosen)) if chosen[number, 0] >= 0]
    assert sum(expert >= 0 for expert in tiles.experts.tolist()) == 3 + 1 + 1


def test_no_rows_and_wrong_shapes() -> None:
    packed, chosen, weights = drawn(2, 2)
    assert run(packed[:0], chosen[:0], weights[:0]).shape == (0, HIDDEN)
    with pytest.raises(InvariantError, match=r"w2\.pairs is "):
        experts.mixture(packed, chosen, weights, W1, experts.Fp4(W2.pairs[:, :, 1:].contiguous(), W2.exponents), W3, LIMIT)


def test_gates_are_cut_in_some_places_and_not_in_others() -> None:
    packed, _, _ = drawn(70, 1)
    gates = unpack_fp8(packed, HIDDEN) @ WIDE1[0].T
    assert 0.02 < (gates > LIMIT).float().mean() < 0.5
