"""Random matrices in the formats of a DeepSeek-V4.1 checkpoint, subnormal numbers among them, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rackserve.kernels.cpu import v41_packing
from rackserve.kernels.cpu.library import Floats
from rackserve.kernels.cpu.packing import Bytes
from rackserve.kernels.cpu.v41_packing import Packed


def _e4m3(code: int) -> float:
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (2.0 ** (exponent - 7) * (1 + fraction / 8) if exponent else 2.0**-6 * fraction / 8)


E4M3 = np.array([_e4m3(code) for code in range(256)], np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp8(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Bytes, Bytes, Floats]:
    codes = rng.integers(8, 0x7F, (outputs, inputs), dtype=np.uint8)
    codes[rng.random(codes.shape) < 0.1] = 0
    codes.flat[rng.choice(codes.size, codes.size // 2100)] = 5
    codes |= rng.integers(0, 2, (outputs, inputs), np.uint8) << 7
    exponents = rng.integers(110, 130, (outputs // 32, inputs // 32), dtype=np.uint8)
    scale = np.exp2(exponents.astype(np.float32) - 127).repeat(32, 0).repeat(32, 1)
    return codes, exponents, E4M3[codes] * scale


def fp4(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Bytes, Bytes, Floats]:
    pairs = rng.integers(0, 256, (outputs, inputs // 2), dtype=np.uint8)
    exponents = rng.integers(110, 130, (outputs, inputs // 32), dtype=np.uint8)
    numbers = np.stack([E2M1[pairs & 15], E2M1[pairs >> 4]], -1).reshape(outputs, inputs)
    return pairs, exponents, numbers * np.exp2(exponents.astype(np.float32) - 127).repeat(32, 1)


def bf16(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[np.ndarray, Floats]:
    bits = (rng.standard_normal((outputs, inputs)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def packed_fp8(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Packed, Floats]:
    codes, exponents, matrix = fp8(rng, outputs, inputs)
    return _there(v41_packing.pack_fp8(codes, exponents)), matrix


def packed_fp4(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Packed, Floats]:
    pairs, exponents, matrix = fp4(rng, outputs, inputs)
    return _there(v41_packing.pack_fp4(pairs, exponents)), matrix


def packed_bf16(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Packed, Floats]:
    bits, matrix = bf16(rng, outputs, inputs)
    return v41_packing.pack_bf16(bits), matrix


def packed_float(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Packed, Floats]:
    matrix = rng.standard_normal((outputs, inputs)).astype(np.float32)
    return v41_packing.pack_float(matrix), matrix


def _there(packed: Packed | None) -> Packed:
    assert packed is not None
    return packed


KINDS: dict[str, Callable[[np.random.Generator, int, int], tuple[Packed, Floats]]] = {
    "fp8": packed_fp8,
    "fp4": packed_fp4,
    "bf16": packed_bf16,
    "float": packed_float,
}
