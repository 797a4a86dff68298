"""Attention over KV of any size is that of float64, and what is not finite reaches those who see it, no one else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rackserve.kernels.cpu import packing
from rackserve.kernels.cpu.decoder import Packed
from tests.kernels.cpu.decoders import Drawn, Running, Shape, reference
from tests.kernels.cpu.variants import ALL, load

TOKENS = 16
"""Of a block."""

SIZES = st.lists(st.sampled_from([0.0, 1e-38, 1e-30, 1e-12, 1e-3, 1.0, 1.0, 1.0, 4.0, 1e3, 1e6]), min_size=1, max_size=7)
"""Of the values of positions, in turns."""


def shape_of(wide: int, head_dim: int = 64) -> Shape:
    return Shape(2, 3, head_dim, 64, 32, 32, 1, TOKENS, wide, ("bf16", "bf16"))


def in_bytes(numbers: NDArray[np.float64], wide: int) -> NDArray[np.uint8]:
    single = numbers.astype(np.float32)
    return (single if wide == 4 else (single.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


class Context:
    """Random KV of `count` positions, and a step behind them."""

    def __init__(self, name: str, shape: Shape, count: int, seed: int, threads: int) -> None:
        self.count, self.rng = count, np.random.default_rng(seed)
        self.drawn = Drawn(shape, count + 1, seed)
        self.blocks = [int(block) for block in self.rng.permutation(count // TOKENS + 1)]
        self.running = Running(load(name), self.drawn, len(self.blocks), count + 1, threads)
        self.tokens = self.rng.integers(0, shape.vocab, count + 1).astype(np.int32)
        self.kv = self.rng.standard_normal((2, shape.kv_heads, count, shape.head_dim))

    def place(self) -> None:
        wide = self.drawn.shape.wide
        for position in range(self.count):
            block = self.running.arena[self.blocks[position // TOKENS], 0]
            block[:, :, position % TOKENS] = in_bytes(self.kv[:, :, position], wide)

    def rows(self, first: int, end: int) -> NDArray[np.float32]:
        return self.running.forward([(self.blocks, first, self.tokens[first:end])])[0]


@ALL
@pytest.mark.parametrize("wide", [2, 4])
@given(
    st.integers(1, 200),
    SIZES,
    st.sampled_from([0.0, 1e-30, 1.0, 3.0]),
    st.sampled_from([32, 64, 96, 256]),
    st.sampled_from([1, 3]),
)
@settings(derandomize=True, max_examples=10, deadline=None)
def test_attention_over_values_of_any_size_is_that_of_float64(
    name: str, wide: int, count: int, sizes: list[float], key_size: float, head_dim: int, threads: int
) -> None:
    context = Context(name, shape_of(wide, head_dim), count, count, threads)
    context.kv[0] *= key_size
    context.kv[1] *= np.resize(sizes, count)[:, None]
    context.place()
    found = context.rows(count, count + 1)[0]
    stored = context.running.kv(context.blocks, count + 1)
    wanted = reference(context.drawn, context.tokens, stored)[0][-1]
    context.drawn.fence.check()
    context.running.close()
    assert np.abs(found - wanted).max() <= (3e-3 if wide == 2 else 1e-4) * np.abs(wanted).max()


@ALL
@pytest.mark.parametrize("wide", [2, 4])
@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("what", [0, 1])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_number_that_is_not_finite_reaches_those_who_see_it_and_no_one_else(
    name: str, wide: int, odd: float, what: int, threads: int
) -> None:
    context = Context(name, shape_of(wide), 90, 1, threads)
    context.place()
    plain = context.rows(60, 75)
    context.kv[what, 1, 80, 7] = odd
    context.place()
    assert np.array_equal(context.rows(60, 75), plain)
    context.kv[what, 1, 50, 7] = odd
    context.place()
    seen = context.rows(60, 75)
    single = context.rows(75, 76)
    context.running.close()
    if wide == 4 and what == 0 and np.isinf(odd):
        return  # a score that is minus infinity in float32 counts as one that is not seen
    assert not np.isfinite(seen).any() and not np.isfinite(single).any()


@ALL
@pytest.mark.parametrize("wide", [2, 4])
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_token_that_is_not_finite_changes_no_row_before_it_in_its_chunk(name: str, wide: int, odd: float) -> None:
    drawn = Drawn(Shape(2, 1, 64, 64, 32, 32, 2, TOKENS, wide, ("bf16", "bf16")), 80, 1)
    embedding = drawn.embedding.astype(np.float32)
    embedding[31] = odd
    packed = packing.pack_bf16((embedding.view(np.uint32) >> 16).astype(np.uint16))
    drawn.weights = replace(drawn.weights, embedding=Packed(drawn.fence.copy(packed), packing.BF16))
    tokens = np.random.default_rng(0).integers(0, 31, 80).astype(np.int32)
    tokens[50] = 31
    running, blocks = Running(load(name), drawn, 5, 80, 1), list(range(5))
    rows = running.forward([(blocks, 0, tokens)])[0]
    assert not np.isfinite(rows[50:]).any()
    single = [running.forward([(blocks, at, tokens[at : at + 1])])[0] for at in range(50)]
    running.close()
    assert np.array_equal(rows[:50], np.concatenate(single))
