"""DeepSeek-V4.1's kernels one at a time at odd shapes against float64: between fences, into poison."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rackserve.model.deepseek_v41 import rounding
from tests.kernels.cpu.variants import ALL, load
from tests.kernels.fence import Fence

Doubles = NDArray[np.float64]
EPS = 1e-6
FORMATS = (
    (rounding.pack_fp8, rounding.unpack_fp8, 2.0**-4), (rounding.pack_fp4, rounding.unpack_fp4, 2.0**-2),
    (rounding.pack_fp4_fine, rounding.unpack_fp4_fine, 2.0**-2),
)  # fmt: skip
"""Of each kind of stored row: the reference, and half a step relative to a number of the upper half of its scale."""

VECTORS = st.integers(1, 19)
SEEDS = st.integers(0, 2**20)
few = settings(derandomize=True, max_examples=25, deadline=None)


def at(array: NDArray[Any]) -> c_void_p:
    return c_void_p(array.ctypes.data)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


class Drawn:
    """Random read-only numbers between fences, and poison to write to."""

    def __init__(self, seed: int) -> None:
        self.rng, self.fence = np.random.default_rng(seed), Fence()
        self.out = self.fence.empty

    def normal(self, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        return self.fence.copy((self.rng.standard_normal(shape) * scale).astype(np.float32))


@ALL
@pytest.mark.parametrize("kind", range(3))
@given(VECTORS, SEEDS, st.sampled_from([1e-12, 1.0, 1e4]))
@few
def test_a_stored_row_has_the_references_bytes_and_is_near_the_numbers(
    name: str, kind: str, groups: int, seed: int, scale: float
) -> None:
    drawn, (pack, unpack, step), channels = Drawn(seed), FORMATS[int(kind)], groups * 32
    row = drawn.normal(channels, scale=scale)
    wanted = pack(torch.tensor(row)[None])[0]
    stored, back = drawn.out(len(wanted), np.uint8), drawn.out(channels)
    load(name).c.rk_v41_pack(int(kind), at(row), channels, at(stored))
    assert np.array_equal(stored, wanted.numpy())
    load(name).c.rk_v41_unpack(int(kind), at(drawn.fence.copy(stored)), channels, at(back))
    assert np.array_equal(back, unpack(wanted[None], channels)[0].numpy())
    width = 16 if kind == 2 else 32
    most = np.abs(row).reshape(-1, width).max(1).repeat(width)
    if scale == 1.0:
        assert (np.abs(back.astype(np.float64) - row) <= 1.01 * step * most).all()
    drawn.fence.check()


@ALL
@given(VECTORS, SEEDS)
@few
def test_a_norm_is_that_of_float64(name: str, vectors: int, seed: int) -> None:
    drawn, n = Drawn(seed), vectors * 16
    row, weight, out = drawn.normal(n, scale=10.0 ** (seed % 5 - 2)), drawn.normal(n), drawn.out(n)
    load(name).c.rk_v41_rms_norm(at(row), at(weight), n, c_float(EPS), at(out))
    wide = row.astype(np.float64)
    assert np.allclose(out, weight * (wide / np.sqrt((wide**2).mean() + EPS)), rtol=2e-6, atol=0)
    drawn.fence.check()


@ALL
@given(VECTORS, SEEDS)
@few
def test_silu_is_that_of_float64(name: str, vectors: int, seed: int) -> None:
    drawn, n = Drawn(seed), vectors * 16
    row, out = drawn.normal(n, scale=10.0 ** (seed % 4 - 1)), drawn.out(n)
    load(name).c.rk_v41_silu(at(row), n, at(out))
    wide = row.astype(np.float64)
    assert np.allclose(out, wide * sigmoid(np.maximum(wide, -500)), rtol=1e-6, atol=1e-30)
    drawn.fence.check()


def mixed(given_: Doubles, iterations: int) -> Doubles:
    """Weights to collapse, to add and to mix with, of 24 numbers."""
    comb = np.exp(given_[8:].reshape(4, 4) - given_[8:].reshape(4, 4).max(1, keepdims=True))
    comb = comb / comb.sum(1, keepdims=True) + EPS
    comb /= comb.sum(0) + EPS
    for _ in range(iterations - 1):
        comb /= comb.sum(1, keepdims=True) + EPS
        comb /= comb.sum(0) + EPS
    return np.concatenate([sigmoid(given_[:4]) + EPS, 2 * sigmoid(given_[4:8]), comb.ravel()])


@ALL
@given(VECTORS, SEEDS, st.integers(1, 20))
@few
def test_a_mix_of_streams_is_that_of_float64(name: str, vectors: int, seed: int, iterations: int) -> None:
    drawn, hidden = Drawn(seed), vectors * 16
    streams, numbers = drawn.normal(4, hidden, scale=3.0), drawn.normal(24, scale=3.0)
    scale, base, out = drawn.normal(24), drawn.normal(24), drawn.out(24)
    sizes = c_float(EPS), c_float(EPS)
    load(name).c.rk_v41_mix(at(streams), hidden, at(numbers), at(scale), at(base), iterations, *sizes, at(out))
    size = 1 / np.sqrt((streams.astype(np.float64) ** 2).mean() + EPS)
    wanted = mixed(numbers.astype(np.float64) * size * scale + base, iterations)
    assert np.allclose(out, wanted, rtol=1e-4, atol=1e-6)
    drawn.fence.check()


@ALL
@given(VECTORS, SEEDS)
@few
def test_streams_are_collapsed_expanded_and_averaged_as_in_float64(name: str, vectors: int, seed: int) -> None:
    c, drawn, hidden = load(name).c, Drawn(seed), vectors * 16
    before, y, mix = drawn.normal(4, hidden), drawn.normal(hidden), drawn.normal(24)
    streams, out, middle = drawn.fence.copy(before, writable=True), drawn.out(hidden), drawn.out(hidden)
    c.rk_v41_collapse(at(streams), at(mix), hidden, at(out))
    wide = before.astype(np.float64)
    assert np.allclose(out, mix[:4].astype(np.float64) @ wide, rtol=0, atol=1e-5)
    c.rk_v41_mean(at(streams), hidden, at(middle))
    assert np.allclose(middle, wide.mean(0), rtol=0, atol=1e-6)
    c.rk_v41_expand(at(y), at(mix), hidden, at(streams))
    wanted = mix[4:8, None].astype(np.float64) * y + mix[8:].reshape(4, 4).T.astype(np.float64) @ wide
    assert np.allclose(streams, wanted, rtol=0, atol=2e-5)
    drawn.fence.check()


@ALL
@given(VECTORS, st.integers(1, 40), st.sampled_from([0, 1, 63, 64, 8191, 65536, 1000000]), SEEDS)
@few
def test_rotation_turns_the_last_channels_and_back(name: str, vectors: int, pairs: int, position: int, seed: int) -> None:
    c, drawn, n = load(name).c, Drawn(seed), vectors * 16
    pairs = min(pairs, n // 2)
    freqs = drawn.fence.copy((10000.0 ** -drawn.rng.random(pairs)).astype(np.float32))
    before, turn = drawn.normal(n), drawn.out((pairs, 2))
    x = drawn.fence.copy(before, writable=True)
    c.rk_v41_turns(at(freqs), pairs, c_int64(position), at(turn))
    angles = (np.float32(position) * freqs).astype(np.float64)  # an angle is a float32, as where the model was trained
    assert np.allclose(turn, np.stack([np.cos(angles), np.sin(angles)], 1), rtol=0, atol=1e-7)
    c.rk_v41_rotate(at(x), n, at(turn), pairs, 0)
    still, pair = np.split(before.astype(np.float64), [n - 2 * pairs])
    turned = (pair.reshape(-1, 2) @ [1, 1j]) * np.exp(1j * angles)
    assert np.array_equal(x[: n - 2 * pairs], still)
    assert np.allclose(x[n - 2 * pairs :].reshape(-1, 2), np.stack([turned.real, turned.imag], 1), rtol=0, atol=2e-6)
    c.rk_v41_rotate(at(x), n, at(turn), pairs, 1)
    assert np.allclose(x, before, rtol=0, atol=2e-6)
    drawn.fence.check()


@ALL
@given(VECTORS, SEEDS)
@few
def test_memory_enters_the_streams_as_in_float64(name: str, vectors: int, seed: int) -> None:
    drawn, hidden = Drawn(seed), vectors * 16
    found, weight = drawn.normal(5, hidden), drawn.normal(4, hidden)
    before = drawn.normal(4, hidden)
    streams = drawn.fence.copy(before, writable=True)
    load(name).c.rk_v41_inject(at(found), at(weight), hidden, c_float(EPS), at(streams))
    wide, keys, value = before.astype(np.float64), found[:4].astype(np.float64), found[4].astype(np.float64)
    size = np.sqrt((wide**2).mean(1) + EPS) * np.sqrt((keys**2).mean(1) + EPS)
    agree = (wide * weight * keys).sum(1) / size / np.sqrt(hidden)
    gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(agree), 1e-6)), agree))
    assert np.allclose(streams, wide + gate[:, None] * value, rtol=1e-4, atol=1e-4)
    drawn.fence.check()


@ALL
@given(st.integers(1, 35), st.integers(1, 6), st.sampled_from([1, 2, 7, 8, 9, 17, 63, 64, 65, 130]), SEEDS)
@few
def test_attention_is_that_of_float64_over_the_rows_that_are_there(
    name: str, heads: int, groups: int, count: int, seed: int
) -> None:
    drawn, dim = Drawn(seed), groups * 32
    queries, sink = drawn.normal(heads, dim, scale=2.0), drawn.normal(heads)
    there = drawn.fence.copy((drawn.rng.random(count) < drawn.rng.choice([0.0, 0.6, 1.0])).astype(np.uint8))
    numbers = drawn.rng.standard_normal((count, dim)).astype(np.float32)
    numbers[there == 0] = np.nan
    rows, out = drawn.fence.copy(numbers), drawn.out((heads, dim))
    load(name).c.rk_v41_attend(at(queries), heads, dim, at(rows), at(there), count, at(sink), at(out))
    seen = rows[there == 1].astype(np.float64)
    logits = np.concatenate([sink[:, None], queries.astype(np.float64) @ seen.T / np.sqrt(dim)], 1)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    assert np.allclose(out, shares[:, 1:] @ seen, rtol=1e-5, atol=5e-6)
    drawn.fence.check()


@ALL
@given(st.integers(1, 20), st.integers(1, 5), st.sampled_from([1, 2, 15, 16, 17, 33, 63, 64, 65]), SEEDS)
@few
def test_index_scores_are_those_of_float64(name: str, heads: int, groups: int, count: int, seed: int) -> None:
    drawn, dim = Drawn(seed), groups * 32
    queries, weights = drawn.normal(heads, dim), drawn.normal(heads)
    stored = rounding.pack_fp4(torch.tensor(drawn.normal(count, dim)))
    keys, out = drawn.fence.copy(stored.numpy()), drawn.out(count)
    load(name).c.rk_v41_score(at(keys), count, at(queries), at(weights), heads, dim, at(out))
    dots = np.maximum(rounding.unpack_fp4(stored, dim).numpy().astype(np.float64) @ queries.T.astype(np.float64), 0)
    assert (np.abs(out - dots @ weights) <= 1e-5 * (dots @ np.abs(weights)) + 1e-5 * heads).all()
    drawn.fence.check()


def tied(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Few different scores, and some that may not be chosen."""
    scores = rng.integers(-3, 4, count).astype(np.float32)
    scores[rng.random(count) < 0.2] = -np.inf
    return scores


def best(scores: NDArray[np.float32], count: int) -> list[int]:
    """The numbers of the largest, the lowest among equals, ascending; -1 in front."""
    order = sorted((-score, number) for number, score in enumerate(scores.tolist()) if score > -np.inf)
    chosen = sorted(number for _, number in order[:count])
    return [-1] * (count - len(chosen)) + chosen


@ALL
@given(st.sampled_from([1, 2, 15, 16, 17, 64, 65, 200]), st.sampled_from([1, 2, 7, 16, 64, 300]), SEEDS)
@few
def test_selection_is_that_of_a_plain_sort(name: str, number: int, count: int, seed: int) -> None:
    drawn = Drawn(seed)
    scores, out = drawn.fence.copy(tied(drawn.rng, number)), drawn.out(count, np.int32)
    load(name).c.rk_v41_best(at(scores), number, count, at(out))
    assert out.tolist() == best(scores, count)
    drawn.fence.check()


@ALL
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 30), SEEDS)
@few
def test_candidate_blocks_are_those_of_a_plain_sort_and_the_newest(
    name: str, number: int, size: int, count: int, seed: int
) -> None:
    drawn = Drawn(seed)
    scores = drawn.fence.copy(tied(drawn.rng, number))
    blocks = -(-number // size)
    mask = drawn.out(blocks, np.uint8)
    load(name).c.rk_v41_candidates(at(scores), number, size, count, at(mask))
    most = np.array([scores[begin : begin + size].max() for begin in range(0, number, size)])
    most[-1] = np.inf
    chosen = [block for block in best(most, count) if block >= 0]
    assert mask.nonzero()[0].tolist() == chosen
    assert blocks - 1 in chosen
    assert set(mask.tolist()) <= {0, 1}
    drawn.fence.check()
