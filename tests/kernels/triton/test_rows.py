from __future__ import annotations

import pytest
import torch

from rackserve.base.errors import InvariantError
from rackserve.model.deepseek_v41 import rounding
from rackserve.model.deepseek_v41.rotation import Rotation
from rackserve.model.deepseek_v41.streams import rms_norm
from tests.kernels.triton.drawn import edges, ending, noise, permuted, poisoned, whole

rows = pytest.importorskip("rackserve.kernels.triton.rows")

PACKS = {"window": rounding.pack_fp8, "index": rounding.pack_fp4, "main": rounding.pack_fp4_fine}
UNPACKS = {"window": rounding.unpack_fp8, "index": rounding.unpack_fp4, "main": rounding.unpack_fp4_fine}
ALL = pytest.mark.parametrize("kind", PACKS)


def turned(count: int, pairs: int) -> tuple[Rotation, tuple[torch.Tensor, torch.Tensor]]:
    rotation = Rotation(torch.rand(pairs, generator=torch.Generator().manual_seed(3)), torch.arange(count) * 977)
    return rotation, (rotation._cos.contiguous(), rotation._sin.contiguous())


@ALL
@pytest.mark.parametrize("channels", [32, 96])
def test_rows_are_stored_as_the_bytes_that_the_reference_stores(kind: str, channels: int) -> None:
    x = edges(channels)
    wanted = PACKS[kind](x)
    cache = poisoned(len(x), 1, wanted.shape[1])
    rows.insert(x, kind, cache, torch.arange(len(x)))
    assert torch.equal(cache[:, 0], wanted)


@ALL
def test_rows_go_to_their_places_across_blocks_and_nowhere_else(kind: str) -> None:
    x = noise(13, 64)
    wanted = PACKS[kind](x)
    arena = poisoned(5, 4 * wanted.shape[1] + 24)
    cache = arena[:, 24:].unflatten(1, (4, -1))
    places = ending(permuted(20)[:13], 19, 0)
    places[4] = -1
    expected = arena.clone()
    expected_cache = expected[:, 24:].unflatten(1, (4, -1))
    for place, row in zip(places.tolist(), wanted, strict=True):
        if place >= 0:
            expected_cache[place // 4, place % 4] = row
    rows.insert(x, kind, cache, places)
    assert torch.equal(arena, expected)


@ALL
@pytest.mark.parametrize(("channels", "pairs"), [(96, 16), (64, 32)])
def test_rows_are_normalised_then_rotated_to_the_bit_where_sums_are_exact(kind: str, channels: int, pairs: int) -> None:
    x, weight = whole(9, channels, most=50), noise(channels, seed=1)
    rotation, tables = turned(9, pairs)
    # sums of whole numbers have one value; the reference's reciprocal root may differ in its last bit, so that is taken exactly
    scale = 1 / (x.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    normed = weight * (x * scale)
    wanted = PACKS[kind](rotation.apply(normed))
    cache, kept = poisoned(9, 1, wanted.shape[1]), torch.full_like(x, torch.nan)
    rows.insert(x, kind, cache, torch.arange(9), weight=weight, eps=1e-20, rotation=tables, normed=kept)
    assert torch.equal(kept, normed)
    assert torch.equal(cache[:, 0], wanted)


@ALL
def test_rows_agree_with_the_reference_within_one_code(kind: str) -> None:
    x, weight = noise(8, 128), noise(128, seed=1)
    rotation, tables = turned(8, 16)
    wanted = PACKS[kind](rotation.apply(rms_norm(x, weight, 1e-20)))
    cache = poisoned(8, 1, wanted.shape[1])
    rows.insert(x, kind, cache, torch.arange(8), weight=weight, eps=1e-20, rotation=tables)
    assert (cache[:, 0] != wanted).float().mean() < 0.01
    found, there = UNPACKS[kind](cache[:, 0], 128), UNPACKS[kind](wanted, 128)
    assert torch.all((found - there).abs() <= there.abs() * 0.5 + 0.5)


def test_served_formats_are_widened_and_a_row_does_not_depend_on_the_others() -> None:
    x, weight = noise(7, 64).bfloat16(), noise(64, seed=1)
    together, alone = poisoned(7, 1, 66), poisoned(7, 1, 66)
    rows.insert(x, "window", together, torch.arange(7), weight=weight, eps=1e-6)
    for number in range(7):
        rows.insert(x[number:][:1], "window", alone, torch.tensor([number]), weight=weight, eps=1e-6)
    assert torch.equal(together, alone)
    assert torch.equal(rows.pack_fp8(x), rounding.pack_fp8(x.float()))


def test_a_number_that_is_not_one_stays_so() -> None:
    x = noise(1, 64)
    x[0, 5] = torch.nan
    assert rows.pack_fp8(x)[0, 5] & 0x7F == 0x7F


def test_no_rows_and_wrong_ones() -> None:
    cache = poisoned(2, 4, 66)
    rows.insert(torch.empty(0, 64), "window", cache, torch.empty(0, dtype=torch.int64))
    assert torch.equal(cache, poisoned(2, 4, 66))
    with pytest.raises(InvariantError, match=r"cache is .*66"):
        rows.insert(noise(1, 64), "main", cache, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InvariantError, match="48 channels"):
        rows.insert(noise(1, 48), "window", poisoned(1, 1, 49), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InvariantError, match="must follow each other"):
        rows.insert(noise(1, 64), "window", poisoned(1, 8, 66)[:, ::2], torch.zeros(1, dtype=torch.int64))
