"""Roundings against a model that looks each value up among all values of the format."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rackserve.model.deepseek_v41.rounding import (
    E4M3_MAX,
    NARROW,
    WIDE,
    pack_fp4,
    pack_fp4_fine,
    pack_fp8,
    round_fp4,
    round_fp8,
    unpack_fp4,
    unpack_fp4_fine,
    unpack_fp8,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [(8 + code % 8) * 2.0 ** (code // 8 - 10) if code >= 8 else code * 2.0**-9 for code in range(127)]
"""Magnitudes by code; the last one is 448, code 127 is NaN."""


def nearest(value: float, magnitudes: list[float]) -> float:
    """The closest number of a format, of two the one with the even code, with the value's sign."""
    size = min(abs(value), magnitudes[-1])
    code = min(range(len(magnitudes)), key=lambda code: (abs(magnitudes[code] - size), code % 2))
    return float(np.copysign(magnitudes[code], value))


def power_above(scale: np.float32) -> float:
    """The smallest power of two that is at least `scale`."""
    mantissa, exponent = np.frexp(scale)
    return 2.0 ** int(exponent - 1 if mantissa == 0.5 else exponent)


def naive_fp8(block: list[float]) -> list[float]:
    scale = power_above(np.float32(max(1e-4, *map(abs, block))) * np.float32(1 / 448))
    return [nearest(value / scale, E4M3) * scale for value in block]


def naive_fp4(block: list[float]) -> list[float]:
    scale = power_above(np.float32(max(6 * 2.0**-126, *map(abs, block))) * np.float32(1 / 6))
    return [nearest(value / scale, E2M1) * scale for value in block]


def naive_fp4_fine(block: list[float]) -> list[float]:
    scale = nearest(float(np.float32(max(6 * 2.0**-9, *map(abs, block))) / np.float32(6)), E4M3)
    return [nearest(float(np.float32(value) / np.float32(scale)), E2M1) * scale for value in block]


Pack = Callable[[Tensor], Tensor]
Unpack = Callable[[Tensor, int], Tensor]
Naive = Callable[[list[float]], list[float]]

KINDS: list[tuple[Pack, Unpack, Naive, int, int]] = [
    (pack_fp8, unpack_fp8, naive_fp8, WIDE, 64 + 2),
    (pack_fp4, unpack_fp4, naive_fp4, WIDE, 32 + 2),
    (pack_fp4_fine, unpack_fp4_fine, naive_fp4_fine, NARROW, 32 + 4),
]

each_kind = pytest.mark.parametrize(("pack", "unpack", "naive", "size", "num_bytes"), KINDS, ids=("fp8", "fp4", "fp4_fine"))

values = st.one_of(
    st.floats(-6, 6, width=32),
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.sampled_from([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -2.5, 448.0, 1e-20, 1e-40, 2.0**-126, 2e38]),
)


@each_kind
@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
def test_every_value_becomes_the_nearest_of_its_block(
    pack: Pack, unpack: Unpack, naive: Naive, size: int, num_bytes: int, data: st.DataObject
) -> None:
    power = 2.0 ** data.draw(st.integers(-12, 12))
    drawn = data.draw(st.lists(values, min_size=64, max_size=64))
    row = [float(np.float32(value * power if abs(value) < 2.0**100 else value)) for value in drawn]
    packed = pack(torch.tensor([row]))
    assert packed.dtype == torch.uint8 and packed.shape == (1, num_bytes)
    want = [value for begin in range(0, 64, size) for value in naive(row[begin : begin + size])]
    assert unpack(packed, 64)[0].tolist() == want


@each_kind
def test_what_is_rounded_already_stays_as_it_is(pack: Pack, unpack: Unpack, naive: Naive, size: int, num_bytes: int) -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-1, 3, 200)[:, None]
    once = unpack(pack(x), 64)
    assert torch.equal(unpack(pack(once), 64), once)
    assert not torch.equal(once, x)


def test_a_main_row_of_tiny_values_is_not_to_be_rounded_twice() -> None:
    """Its scale is then a subnormal of few bits, and the largest value need not get the largest code. Rows are packed once."""
    x = torch.full((1, 16), 6 * 1.6 * 2.0**-9)
    once = unpack_fp4_fine(pack_fp4_fine(x), 16)
    assert not torch.equal(unpack_fp4_fine(pack_fp4_fine(once), 16), once)


def test_ties_of_e2m1_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    block = torch.cat((ties, -ties)).repeat(2)
    want = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(round_fp4(block[None])[0], torch.cat((want, -want)).repeat(2))  # the scale is 1
    assert torch.equal(unpack_fp4_fine(pack_fp4_fine(block[None]), 32)[0], torch.cat((want, -want)).repeat(2))


def test_fp8_codes_are_those_of_a_cast_where_the_scale_is_one() -> None:
    x = torch.linspace(-448, 448, 32 * 999).view(-1, 32)
    x[:, 0] = E4M3_MAX
    assert torch.equal(round_fp8(x), x.to(torch.float8_e4m3fn).float())


@each_kind
def test_zeros_and_the_largest_numbers_stay_finite(pack: Pack, unpack: Unpack, naive: Naive, size: int, num_bytes: int) -> None:
    assert torch.equal(unpack(pack(torch.zeros(3, 64)), 64), torch.zeros(3, 64))
    huge = unpack(pack(torch.full((1, 64), torch.finfo(torch.float32).max / 4)), 64)
    assert bool(huge.isfinite().all()) and bool((huge > 0).all())


@each_kind
def test_a_row_is_packed_alike_among_other_rows_and_dimensions(
    pack: Pack, unpack: Unpack, naive: Naive, size: int, num_bytes: int
) -> None:
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(2))
    packed = pack(x)
    assert packed.shape == (5, 3, num_bytes)
    assert torch.equal(packed[4, 1], pack(x[4, 1]))
    assert torch.equal(unpack(packed, 64)[2], unpack(packed[2], 64))
    assert pack(x[:0]).shape == (0, 3, num_bytes)


def test_the_low_half_of_a_byte_holds_the_first_of_two_channels() -> None:
    row = torch.zeros(1, 32)
    row[0, 0], row[0, 1] = 6.0, -0.5
    assert pack_fp4(row)[0, 0] == 7 | (9 << 4)
