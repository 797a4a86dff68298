"""The DeepSeek-V4.1 kernels one at a time, against the torch path or float64, at odd shapes; and the independence of rows."""

from __future__ import annotations

from ctypes import c_float, c_void_p

import numpy as np
import pytest
import torch
from torch import Tensor

from rackserve.kernels.cpu import v41
from rackserve.kernels.cpu.library import Library
from rackserve.model.deepseek_v41 import rounding
from rackserve.model.deepseek_v41.attention import attend
from rackserve.model.deepseek_v41.indexer import best
from rackserve.model.deepseek_v41.streams import rms_norm
from rackserve.model.products import Products
from tests.kernels.cpu.v41_matrices import KINDS
from tests.kernels.cpu.variants import ALL, load

SMALL = c_float(1e-20)


def at(tensor: Tensor) -> c_void_p:
    assert tensor.is_contiguous()
    return c_void_p(tensor.data_ptr())


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@ALL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (96, 64), (160, 416), (32, 1600)])
def test_products_are_right_and_rows_do_not_see_each_other(name: str, kind: str, outputs: int, inputs: int) -> None:
    packed, matrix = KINDS[kind](np.random.default_rng(inputs), outputs, inputs)
    rows = np.random.default_rng(1).standard_normal((40, inputs)).astype(np.float32)
    whole = v41.product(load(name), packed, rows)
    wanted = rows.astype(np.float64) @ matrix.astype(np.float64).T
    size = np.abs(rows).astype(np.float64) @ np.abs(matrix).astype(np.float64).T
    assert np.all(np.abs(whole - wanted) <= 1e-5 * size)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 39):
        assert np.array_equal(v41.product(load(name), packed, rows[-count:]), whole[-count:])


PACKS = (
    (rounding.pack_fp8, rounding.unpack_fp8), (rounding.pack_fp4, rounding.unpack_fp4),
    (rounding.pack_fp4_fine, rounding.unpack_fp4_fine),
)  # fmt: skip


def edges(channels: int) -> Tensor:
    """Rows over many sizes; ties between two codes of every scale, zeros of both signs, and the largest of a scale."""
    rows = noise(200, channels) * torch.logspace(-20, 6, 200)[:, None]
    halves = torch.arange(channels).float() / 4 - channels / 8
    ties = torch.stack([halves * 2.0**power for power in range(-8, 8)])
    rows[::17] = 0.0
    rows[1::17, ::2] = -0.0
    return torch.cat([rows, ties, ties + ties.abs() * 2.0**-23])


@ALL
@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("channels", [32, 96, 64])
def test_rows_are_stored_as_the_bytes_that_torch_stores(name: str, kind: int, channels: int) -> None:
    c, (pack, unpack), rows = load(name).c, PACKS[kind], edges(channels)
    wanted = pack(rows)
    found, numbers = torch.full_like(wanted, 0xAA), torch.full_like(rows, torch.nan)
    for row, to, back in zip(rows, found, numbers, strict=True):
        c.rk_v41_pack(kind, at(row), channels, at(to))
        c.rk_v41_unpack(kind, at(to), channels, at(back))
    assert torch.equal(found, wanted)
    assert torch.equal(numbers, unpack(wanted, channels))


@ALL
def test_a_row_that_is_not_finite_stays_so(name: str) -> None:
    row, packed, back = noise(64), torch.zeros(66, dtype=torch.uint8), torch.zeros(64)
    row[5] = torch.nan
    load(name).c.rk_v41_pack(0, at(row), 64, at(packed))
    load(name).c.rk_v41_unpack(0, at(packed), 64, at(back))
    assert bool(back[5].isnan())
    packed.fill_(0xFF)
    load(name).c.rk_v41_unpack(0, at(packed), 64, at(back))
    assert not bool(back.isfinite().any())


@ALL
@pytest.mark.parametrize("channels", [16, 32, 96, 512, 2080])
def test_norms_agree(name: str, channels: int) -> None:
    rows, weight = noise(20, channels), noise(channels, seed=1)
    found = torch.full_like(rows, torch.nan)
    for row, to in zip(rows, found, strict=True):
        load(name).c.rk_v41_rms_norm(at(row), at(weight), channels, SMALL, at(to))
    assert torch.allclose(found, rms_norm(rows, weight, 1e-20), rtol=1e-6, atol=1e-7)


@ALL
def test_silu_agrees_on_both_sides_and_far_out(name: str) -> None:
    x = torch.cat([noise(200) * 5, torch.tensor([0.0, -0.0, 90.0, -90.0, 1e4, -1e4, 1e-20, -1e-20])])
    found = torch.full_like(x, torch.nan)
    load(name).c.rk_v41_silu(at(x), len(x), at(found))
    assert torch.allclose(found, torch.nn.functional.silu(x), rtol=1e-6, atol=1e-30)


@ALL
@pytest.mark.parametrize(("heads", "dim", "rows"), [(1, 32, 1), (4, 64, 24), (6, 96, 37), (16, 128, 70), (17, 32, 9)])
def test_attention_agrees(name: str, heads: int, dim: int, rows: int) -> None:
    c, count = load(name).c, 12
    queries, keys, sink = noise(count, heads, dim), noise(count, rows, dim, seed=1), noise(heads, seed=2)
    there = noise(count, rows, seed=3) > -0.5
    there[0] = False
    there[1] = True
    wanted = attend(Products("direct"), queries, keys.masked_fill(~there[..., None], 0.0), there, sink)
    keys.masked_fill_(~there[..., None], torch.nan)  # what is not there may be anything
    found = torch.full_like(queries, torch.nan)
    flags = there.to(torch.uint8)
    for number in range(count):
        given = at(queries[number]), heads, dim, at(keys[number]), at(flags[number]), rows, at(sink)
        c.rk_v41_attend(*given, at(found[number]))
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@ALL
@pytest.mark.parametrize(("heads", "dim", "rows"), [(1, 32, 1), (4, 32, 17), (5, 64, 33), (11, 128, 50)])
def test_index_scores_agree(name: str, heads: int, dim: int, rows: int) -> None:
    packed = rounding.pack_fp4(noise(rows, dim))
    queries, weights = noise(heads, dim, seed=1), noise(heads, seed=2)
    found = torch.full((rows,), torch.nan)
    load(name).c.rk_v41_score(at(packed), rows, at(queries), at(weights), heads, dim, at(found))
    dots = (rounding.unpack_fp4(packed, dim).double() @ queries.double().T).relu()
    assert torch.allclose(found.double(), dots @ weights.double(), rtol=1e-4, atol=1e-5)


@ALL
@pytest.mark.parametrize("count", [1, 5, 8, 40])
def test_the_best_scores_are_chosen_lowest_number_first_among_equals(name: str, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for size in (1, 3, 8, 30, 33):
        scores = torch.randint(-3, 3, (20, size), generator=generator).float()
        scores[scores == -3] = -torch.inf
        scores[::2] += noise(10, size)
        wanted = best(scores, count)
        for row, chosen in zip(scores, wanted, strict=True):
            found = torch.full((count,), 99, dtype=torch.int32)
            load(name).c.rk_v41_best(at(row), size, count, at(found))
            assert found.tolist() == chosen.tolist()


@ALL
def test_the_block_of_the_newest_row_is_always_a_candidate(name: str) -> None:
    scores = torch.tensor([9.0, 0, 0, 5, 0, 0, 7, 0, 0, -1])
    mask = torch.full((4,), 9, dtype=torch.uint8)
    load(name).c.rk_v41_candidates(at(scores), 10, 3, 2, at(mask))
    assert mask.tolist() == [1, 0, 0, 1]
    load(name).c.rk_v41_candidates(at(scores), 10, 3, 9, at(mask))
    assert mask.tolist() == [1, 1, 1, 1]


def mixed(library: Library, streams: Tensor, numbers: Tensor) -> Tensor:
    scale, base, out = noise(24, seed=4).abs(), noise(24, seed=5), torch.full((24,), torch.nan)
    library.c.rk_v41_mix(at(streams), streams.shape[1], at(numbers), at(scale), at(base), 20, c_float(1e-6), SMALL, at(out))
    return out


@ALL
@pytest.mark.parametrize("hidden", [32, 160])
def test_mixes_agree_and_their_rows_and_columns_sum_to_one(name: str, hidden: int) -> None:
    for seed in range(10):
        streams, numbers = noise(4, hidden, seed=seed), noise(24, seed=seed + 100)
        found = mixed(load(name), streams, numbers)
        size = torch.rsqrt(streams.double().square().mean() + 1e-20)
        given = numbers.double() * size * noise(24, seed=4).abs().double() + noise(24, seed=5).double()
        assert torch.allclose(found[:4].double(), given[:4].sigmoid() + 1e-6, rtol=1e-5)
        assert torch.allclose(found[4:8].double(), 2 * given[4:8].sigmoid(), rtol=1e-5)
        comb = given[8:].view(4, 4).softmax(-1) + 1e-6
        comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
        for _ in range(19):
            comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
        assert torch.allclose(found[8:].view(4, 4).double(), comb, rtol=1e-4, atol=1e-6)
        assert torch.allclose(found[8:].view(4, 4).sum(0), torch.ones(4), atol=1e-4)


@ALL
@pytest.mark.parametrize("hidden", [32, 160])
def test_memory_enters_the_streams_by_its_agreement_with_them(name: str, hidden: int) -> None:
    streams, found, weight = noise(4, hidden), noise(5, hidden, seed=1), noise(4, hidden, seed=2)
    keys, value = found[:4].double(), found[4].double()
    scale = torch.rsqrt(streams.double().square().mean(1)) * torch.rsqrt(keys.square().mean(1))
    dot = (streams.double() * weight.double() * keys).sum(1) * scale * hidden**-0.5
    gate = torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot).sigmoid()
    wanted = streams.double() + gate[:, None] * value
    load(name).c.rk_v41_inject(at(found), at(weight), hidden, SMALL, at(streams))
    assert torch.allclose(streams.double(), wanted, rtol=1e-5, atol=1e-6)
