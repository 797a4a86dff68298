"""Kernels at drawn shapes, in ragged batches and at the ends of blocks, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rackserve.model.deepseek_v41.indexer import best
from rackserve.model.deepseek_v41.rounding import pack_fp4, round_fp4, unpack_fp4
from tests.kernels.triton import test_attention, test_streams
from tests.kernels.triton.drawn import ending, fenced, noise, permuted, poisoned

attention = pytest.importorskip("rackserve.kernels.triton.attention")
indexer = pytest.importorskip("rackserve.kernels.triton.indexer")
reduction = pytest.importorskip("rackserve.kernels.triton.reduction")
selection = pytest.importorskip("rackserve.kernels.triton.selection")

EPS = 1e-6
EDGES = st.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65])
GROUPS, SEEDS = st.integers(1, 4), st.integers(0, 2**20)
few = settings(derandomize=True, max_examples=5, deadline=None, phases=[Phase.generate])


@pytest.mark.parametrize("way", ["decode", "prefill"])
@given(st.lists(EDGES, min_size=1, max_size=4), st.integers(1, 20), GROUPS, st.integers(1, 70), st.integers(1, 70))
@few
def test_attention_is_that_of_float64(way: str, lengths: list[int], heads: int, groups: int, window: int, topk: int) -> None:
    firsts = [length // 3 for length in lengths]
    case = test_attention.Case(lengths, heads, groups * 32, window, topk, window + len(lengths), firsts)
    out = getattr(attention, way)(case.queries, case.window, case.chosen, case.sink)
    assert torch.all((out - case.wanted()).abs() <= 4e-6)


@given(st.lists(st.sampled_from([0, 1, 15, 16, 17, 127, 128, 129]), min_size=1, max_size=3), st.integers(1, 20), GROUPS, SEEDS)
@few
def test_scores_and_what_is_selected_by_them_are_those_of_float64(
    visible: list[int], heads: int, groups: int, seed: int
) -> None:
    count, dim, rows, width = len(visible), groups * 32, 16, max(1, *visible)
    blocks = -(-width // rows)
    arena = poisoned(count * blocks, rows * (dim // 2 + dim // 32) + 24)
    cache = arena[:, 24:].unflatten(1, (rows, -1))
    longest = visible.index(max(visible))
    tables = ending(permuted(count * blocks, seed=seed).view(count, blocks), count * blocks - 1, longest, blocks - 1)
    queries, weights = fenced(round_fp4(noise(count, heads, dim, seed=seed))), noise(count, heads, seed=seed + 1)
    wanted = torch.full((count, width), -torch.inf, dtype=torch.float64)
    size = torch.ones(count, width, dtype=torch.float64)
    for number, length in enumerate(visible):
        stored = pack_fp4(noise(length, dim, seed=seed + 2 + number))
        for row in range(length):
            cache[tables[number, row // rows], row % rows] = stored[row]
        dots = (unpack_fp4(stored, dim).double() @ queries[number].double().T).relu()
        wanted[number, :length] = dots @ weights[number].double()
        size[number, :length] += dots @ weights[number].double().abs()
    sequences, seen = (fenced(torch.tensor(numbers).int()) for numbers in (list(range(count)), visible))
    found = indexer.scores(queries, weights, indexer.Keys(cache, fenced(tables.int()), sequences, seen), width)
    there = wanted > -torch.inf
    assert torch.equal(found > -torch.inf, there)
    assert torch.all((found[there] - wanted[there]).abs() <= 1e-5 * size[there])
    assert torch.equal(selection.select(found, 7).long(), best(found, 7))


def mixed(streams: Tensor, mixing: test_streams.streams.Mixing) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of the next sublayer, in float64."""
    count, n, _ = streams.shape
    wide, kinds = streams.double().flatten(1), torch.tensor([n, n, n * n])
    numbers = wide @ mixing.fn.double().T * torch.rsqrt((wide**2).mean(1, keepdim=True) + mixing.norm_eps)
    numbers = numbers * mixing.scale.double().repeat_interleave(kinds) + mixing.base.double()
    pre, post, comb = numbers.split(kinds.tolist(), 1)
    comb = comb.view(count, n, n).softmax(-1) + EPS
    comb = comb / (comb.sum(1, keepdim=True) + EPS)
    for _ in range(mixing.iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + EPS)
        comb = comb / (comb.sum(1, keepdim=True) + EPS)
    return pre.sigmoid() + EPS, 2 * post.sigmoid(), comb


@given(st.sampled_from([1, 2, 15, 16, 17, 33]), st.sampled_from([1, 2, 4]), st.sampled_from([32, 64, 96, 160]))
@few
def test_streams_are_those_of_float64(count: int, n: int, d: int) -> None:
    drawn = test_streams.Drawn(count, n, d)
    done = drawn.run()
    mix, h, y = drawn.mix, drawn.h.double(), drawn.y.double()
    wanted = mix.post.double()[..., None] * y[:, None] + mix.comb.double().transpose(1, 2) @ h
    assert torch.allclose(done.streams.double(), wanted, rtol=0, atol=1e-5)
    collapsed = (drawn.pre.double()[..., None] * wanted).sum(1)
    normed = collapsed * torch.rsqrt((collapsed**2).mean(1, keepdim=True) + 1e-6) * drawn.weight
    assert torch.allclose(done.x.double(), normed, rtol=1e-4, atol=1e-5)
    for found, right in zip((done.mix.pre, done.mix.post, done.mix.comb), mixed(wanted, drawn.mixing), strict=True):
        assert torch.allclose(found.double(), right, rtol=1e-4, atol=1e-5)


@given(st.integers(1, 4), EDGES, st.sampled_from([32, 96, 160, 1056]))
@few
def test_sums_of_devices_and_their_norm_are_those_of_float64(devices: int, count: int, d: int) -> None:
    parts = [noise(count, d, seed=device) for device in range(devices)]
    residual, weight = noise(count, d, seed=50), noise(d, seed=51)
    total, normed = reduction.reduce_norm(parts[0], reduction.GatheredParts(lambda part: parts), residual, weight, EPS)
    wanted = torch.stack([*parts, residual]).double().sum(0)
    assert torch.allclose(total.double(), wanted, rtol=0, atol=1e-5)
    right = wanted * torch.rsqrt((wanted**2).mean(1, keepdim=True) + EPS) * weight
    assert torch.allclose(normed.double(), right, rtol=1e-5, atol=1e-5)
