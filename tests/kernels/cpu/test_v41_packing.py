"""Packed matrices hold the checkpoint's numbers and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from rackserve.kernels.cpu import v41, v41_packing
from rackserve.kernels.cpu.v41_packing import Packed
from tests.kernels.cpu.v41_matrices import E4M3, KINDS, bf16, fp4, fp8
from tests.kernels.cpu.variants import ALL, load


@ALL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (64, 96), (160, 448)])
def test_a_product_with_unit_rows_gives_back_the_matrix_to_the_bit(name: str, kind: str, outputs: int, inputs: int) -> None:
    packed, matrix = KINDS[kind](np.random.default_rng(outputs), outputs, inputs)
    found = v41.product(load(name), packed, np.eye(packed.inputs, dtype=np.float32))
    assert np.array_equal(found.T[:outputs, :inputs], matrix)


def test_odd_shapes_are_filled_up_with_zeros() -> None:
    packed = v41_packing.pack_bf16(np.full((5, 17), 0x3F80, np.uint16))
    assert (packed.outputs, packed.inputs) == (16, 32)
    assert int(packed.codes.view(np.uint16).astype(bool).sum()) == 5 * 17


def test_codes_and_scales_that_are_no_plain_numbers_are_left_to_float32() -> None:
    rng = np.random.default_rng(0)
    codes, exponents = rng.integers(8, 0x7F, (32, 32), dtype=np.uint8), np.full((1, 1), 127, np.uint8)
    assert isinstance(v41_packing.pack_fp8(codes, exponents), Packed)
    assert v41_packing.pack_fp8(codes, np.full((1, 1), 135, np.uint8)) is None
    codes[3, 4] = 0xFF
    assert v41_packing.pack_fp8(codes, exponents) is None
    codes[:] = 0x38
    codes[0] = 0x03
    assert v41_packing.pack_fp8(codes, exponents) is None
    codes[0] = 0x80
    assert isinstance(v41_packing.pack_fp8(codes, exponents), Packed)
    pairs, scales = rng.integers(0, 256, (32, 16), dtype=np.uint8), np.full((32, 1), 127, np.uint8)
    assert isinstance(v41_packing.pack_fp4(pairs, scales), Packed)
    for bad in (0, 255):
        scales[7] = bad
        assert v41_packing.pack_fp4(pairs, scales) is None


def test_the_matrices_of_these_tests_are_what_torch_makes_of_their_codes() -> None:
    import torch

    from rackserve.model.deepseek_v41.weights import Packed as Stored

    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(table, E4M3, equal_nan=True)
    rng = np.random.default_rng(1)
    codes, exponents, matrix = fp8(rng, 64, 96)
    stored = Stored(torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(exponents).view(torch.float8_e8m0fnu))
    assert np.array_equal(stored.widen().numpy(), matrix)
    pairs, scales, matrix = fp4(rng, 64, 96)
    stored = Stored(torch.from_numpy(pairs.view(np.int8)), torch.from_numpy(scales).view(torch.float8_e8m0fnu))
    assert np.array_equal(stored.widen().numpy(), matrix)
    bits, matrix = bf16(rng, 5, 17)
    assert np.array_equal(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy(), matrix)
