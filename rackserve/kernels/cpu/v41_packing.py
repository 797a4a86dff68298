"""Matrices of a DeepSeek-V4.1 checkpoint in the order in which kernels read them (src/v41_matrix.h). Nothing is rounded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rackserve.kernels.cpu.library import Floats
from rackserve.kernels.cpu.packing import GROUP, LANES, Bytes, fresh

F8, F4, B16, FLOAT = 0, 1, 2, 3

FRONT = 64
"""Bytes before the codes that a kernel may read."""

NAN = 0x7F
LARGEST = 127 + 7
"""Exponent byte of the largest scale that is a float when multiplied by 2^120."""

MAX_SUBNORMAL = 2.0**-11
"""Share of e4m3 codes below the smallest normal one up to which they are read from codes: each takes some 150 cycles."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix of `outputs` x `inputs` numbers, both filled up with zeros to whole tiles and groups.

    quantised  what it is multiplied with is rounded to fp8, where that is wanted
    """

    codes: Bytes
    scales: NDArray[np.generic]
    kind: int
    outputs: int
    inputs: int
    quantised: bool


def pack_fp8(codes: Bytes, exponents: Bytes) -> Packed | None:
    """e4m3 codes [outputs, inputs] and exponent bytes [outputs / 32, inputs / 32].

    None if not all are plain numbers, or more than MAX_SUBNORMAL are subnormal.
    """
    sizes = codes & NAN
    subnormal = np.count_nonzero((sizes < 8) & (sizes > 0))
    if exponents.max() > LARGEST or bool((sizes == NAN).any()) or subnormal > MAX_SUBNORMAL * codes.size:
        return None
    tiles, groups = codes.shape[0] // LANES, codes.shape[1] // GROUP
    lanes = codes.reshape(tiles, LANES, groups, 8, 4).transpose(0, 2, 3, 1, 4)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127 + 120).astype(np.float32)
    return Packed(_laid(lanes), np.ascontiguousarray(scales.repeat(2, 0)), F8, codes.shape[0], codes.shape[1], True)


def pack_fp4(pairs: Bytes, exponents: Bytes) -> Packed | None:
    """Pairs of e2m1 [outputs, inputs / 2] and exponent bytes [outputs, inputs / 32]; None if a scale is no plain number."""
    if exponents.min() < 1 or exponents.max() > 254:
        return None
    outputs, inputs = pairs.shape[0], pairs.shape[1] * 2
    tiles, groups = outputs // LANES, inputs // GROUP
    lanes = pairs.reshape(tiles, LANES, groups, 4, 4).transpose(0, 2, 3, 1, 4)
    scales = exponents.reshape(tiles, LANES, groups).transpose(0, 2, 1)
    return Packed(_laid(lanes), np.ascontiguousarray(scales), F4, outputs, inputs, True)


def pack_bf16(bits: NDArray[np.uint16], *, quantised: bool = False) -> Packed:
    """bf16 numbers as bits, [outputs, inputs]."""
    filled = _filled(bits)
    tiles, groups = filled.shape[0] // LANES, filled.shape[1] // GROUP
    lanes = filled.reshape(tiles, LANES, groups, 16, 2).transpose(0, 2, 3, 1, 4)
    return Packed(_laid(lanes), np.empty(0, np.uint8), B16, filled.shape[0], filled.shape[1], quantised)


def pack_float(numbers: Floats, *, quantised: bool = False) -> Packed:
    """Numbers as they are, [outputs, inputs]."""
    filled = _filled(numbers)
    tiles, groups = filled.shape[0] // LANES, filled.shape[1] // GROUP
    lanes = filled.reshape(tiles, LANES, groups, GROUP).transpose(0, 2, 3, 1)
    return Packed(_laid(lanes), np.empty(0, np.uint8), FLOAT, filled.shape[0], filled.shape[1], quantised)


def _filled(numbers: NDArray[np.generic]) -> NDArray[np.generic]:
    outputs, inputs = numbers.shape
    return np.pad(numbers, ((0, -outputs % LANES), (0, -inputs % GROUP)))


def _laid(lanes: NDArray[np.generic]) -> Bytes:
    """The bytes of `lanes` in order, behind FRONT others."""
    codes = fresh(lanes.nbytes + FRONT)[FRONT:]
    codes.view(lanes.dtype).reshape(lanes.shape)[:] = lanes
    return codes
