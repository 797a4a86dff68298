"""Products at odd shapes against float64: between fences, into poison."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rackserve.kernels.cpu import v41, v41_packing
from rackserve.kernels.cpu.library import view_of
from tests.kernels.cpu import v41_matrices
from tests.kernels.cpu.variants import ALL, KINDS, load, rounded, some_rows
from tests.kernels.fence import Fence

ROWS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 17, 31, 63, 64, 65, 95, 97])
TILES, GROUPS = st.integers(1, 5), st.integers(1, 21)
"""Of outputs, of inputs: 21 groups are more than two chunks of unpacked weights, or parts of a sum, and no multiple of one."""


def at(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@ALL
@pytest.mark.parametrize("kind", KINDS)
@given(TILES, GROUPS, ROWS)
@settings(derandomize=True, max_examples=20, deadline=None)
def test_a_product_is_that_of_float64_and_touches_its_own_memory_alone(
    name: str, kind: str, tiles: int, groups: int, rows: int
) -> None:
    make, pack, code = KINDS[kind]
    rng, fence = np.random.default_rng(tiles * 1000 + groups * 100 + rows), Fence()
    stored, matrix = make(rng, tiles * 16, groups * 32)
    packed, given_rows = fence.copy(pack(stored)), fence.copy(some_rows(rng, rows, groups * 32))  # type: ignore[operator]
    out = fence.empty((rows, tiles * 16))
    load(name).c.rk_product(view_of(packed, code), at(given_rows), rows, at(out))
    seen, between = rounded(given_rows, kind)
    size = np.abs(seen) @ np.abs(matrix.T).astype(np.float64)
    limit = size * 1e-6 * np.sqrt(groups * 32) + between @ np.abs(matrix.T) + 1e-9
    assert (np.abs(out - seen @ matrix.T.astype(np.float64)) <= limit).all()
    fence.check()


@ALL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 12, 21])
@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_nothing_that_is_and_changes_no_other(
    name: str, kind: str, rows: int, odd: float
) -> None:
    make, pack, code = KINDS[kind]
    rng = np.random.default_rng(rows)
    packed = pack(make(rng, 32, 96)[0])  # type: ignore[operator]
    plain = rng.standard_normal((rows, 96)).astype(np.float32)
    given_rows = plain.copy()
    given_rows[rows // 2, rng.integers(0, 96, 1 + rows % 2)] = odd
    found, wanted = (load(name).product(packed, code, each) for each in (given_rows, plain))
    assert not np.isfinite(found[rows // 2]).any()
    found[rows // 2] = wanted[rows // 2]
    assert np.array_equal(found, wanted)


@ALL
@pytest.mark.parametrize("size", [1e30, 1e33, 1e34, 1e37])
def test_rows_of_8_bits_near_the_end_of_float32_are_the_same_alone_and_together(name: str, size: float) -> None:
    make, pack, code = KINDS["q4_1, 8 bits"]
    rng = np.random.default_rng(3)
    packed = pack(make(rng, 32, 96)[0])  # type: ignore[operator]
    rows = rng.standard_normal((40, 96)).astype(np.float32) * np.float32(size)
    together = load(name).product(packed, code, rows)
    single = np.concatenate([load(name).product(packed, code, rows[at : at + 1]) for at in range(40)])
    assert np.array_equal(together, single, equal_nan=True)


@ALL
@pytest.mark.parametrize("kind", KINDS)
@given(TILES, GROUPS, st.integers(0, 79))
@settings(derandomize=True, max_examples=8, deadline=None)
def test_a_row_of_a_matrix_is_read_to_the_bit_and_nothing_behind_it(
    name: str, kind: str, tiles: int, groups: int, row: int
) -> None:
    make, pack, code = KINDS[kind]
    fence = Fence()
    stored, matrix = make(np.random.default_rng(row), tiles * 16, groups * 32)
    packed, out = fence.copy(pack(stored)), fence.empty(groups * 32)  # type: ignore[operator]
    load(name).c.rk_unpack_row(view_of(packed, code), row % (tiles * 16), at(out))
    assert np.array_equal(out, matrix[row % (tiles * 16)])
    fence.check()


@ALL
@pytest.mark.parametrize("kind", v41_matrices.KINDS)
@given(st.integers(1, 9), GROUPS, ROWS)
@settings(derandomize=True, max_examples=20, deadline=None)
def test_a_product_with_stored_weights_is_that_of_float64_and_touches_its_own_memory_alone(
    name: str, kind: str, tiles: int, groups: int, rows: int
) -> None:
    tiles += tiles % 2 if kind in ("fp8", "fp4") else 0  # their scales are of 32 outputs
    rng, fence = np.random.default_rng(tiles * 1000 + groups * 100 + rows), Fence()
    packed, matrix = v41_matrices.KINDS[kind](rng, tiles * 16, groups * 32)
    # What a kernel may read in front of codes belongs to them.
    codes = fence.copy(np.concatenate([np.full(v41_packing.FRONT, 0xFF, np.uint8), packed.codes]))[v41_packing.FRONT :]
    scales = fence.copy(packed.scales)
    given_rows = fence.copy(some_rows(rng, rows, groups * 32))
    out = fence.empty((rows, tiles * 16))
    view = v41._Matrix(codes.ctypes.data, scales.ctypes.data, packed.kind, packed.outputs, packed.inputs, packed.quantised)
    load(name).c.rk_v41_product(ctypes.byref(view), at(given_rows), rows, at(out))
    wide = given_rows.astype(np.float64)
    size = np.abs(wide) @ np.abs(matrix.T).astype(np.float64)
    assert (np.abs(out - wide @ matrix.T.astype(np.float64)) <= 1e-5 * size + 1e-9).all()
    fence.check()
