"""The variants built for the tests, and matrices in every kind."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rackserve.kernels.cpu import library, packing
from rackserve.kernels.cpu.build import BUILT, variants
from rackserve.kernels.cpu.library import NEEDED, Floats, Library, features


@cache
def load(name: str) -> Library:
    """One variant; the test is skipped where it was not built or cannot run."""
    file = BUILT / f"kernels-{name}.so"
    if not file.exists() or not NEEDED[name] <= features():
        pytest.skip(f"kernels {name} are not built, or not for this processor")
    return Library(Path(file))


ALL = pytest.mark.parametrize("name", variants())


def halves(values: Floats) -> packing.Bytes:
    return values.astype(np.float16)[..., None].view(np.uint8)


def q4_1(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[packing.Bytes, Floats]:
    """Random Q4_1 blocks and the matrix they stand for."""
    shape = (outputs, inputs // 32)
    scale, offset = (rng.uniform(-1, 1, shape).astype(np.float16) for _ in range(2))
    nibbles = rng.integers(0, 16, (*shape, 32), dtype=np.uint8)
    packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    blocks = np.concatenate([halves(scale), halves(offset), packed], -1)
    matrix = nibbles * scale[..., None].astype(np.float32) + offset[..., None].astype(np.float32)
    return blocks, matrix.reshape(outputs, inputs).astype(np.float32)


def q8_0(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[packing.Bytes, Floats]:
    """Random Q8_0 blocks, extremes among them, and the matrix they stand for."""
    shape = (outputs, inputs // 32)
    scale = rng.uniform(-1, 1, shape).astype(np.float16)
    values = rng.choice(np.array([-128, -127, 127, 0, 1, -1, 77], np.int8), (*shape, 32))
    blocks = np.concatenate([halves(scale), values.view(np.uint8)], -1)
    return blocks, (values * scale[..., None].astype(np.float32)).reshape(outputs, inputs).astype(np.float32)


def bf16(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[np.ndarray, Floats]:
    """Random bf16 bits and the matrix they stand for."""
    bits = (rng.standard_normal((outputs, inputs)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(rows: Floats, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows as a kind sees them, in float64, and by how much a number that lies between two steps may differ.

    16 bits, the largest number of a row being 32512; with "8 bits" 127 and group by group, but 16 bits in groups that reach
    further than 8 times the row's root mean square.
    """
    wide = rows.astype(np.float64)
    if kind == "bf16":
        return wide, np.zeros_like(wide)
    groups = wide.reshape(len(rows), -1, 32 if "8 bits" in kind else rows.shape[1])
    most = np.abs(groups).max(-1, keepdims=True)
    apart = most > 8 * np.sqrt((wide**2).mean(-1))[:, None, None]
    step = np.where(most > 0, most, 1) / np.where(apart | ("8 bits" not in kind), 32512, 127)
    whole = groups / step
    between = np.abs(np.abs(whole - np.rint(whole)) - 0.5) < 0.01
    return (np.rint(whole) * step).reshape(rows.shape), (between * step).reshape(rows.shape)


def some_rows(rng: np.random.Generator, rows: int, inputs: int) -> Floats:
    """Small, large and zero rows; in every other one a number or two stick out."""
    given = rng.standard_normal((rows, inputs)) * rng.choice([0.0, 1e-3, 1.0, 50.0], (rows, 1))
    given[::2, rng.integers(0, inputs, 2)] *= 40
    return given.astype(np.float32)


KINDS = {
    "q4_1": (q4_1, packing.pack_q4_1, packing.Q4),
    "q4_1, 8 bits": (q4_1, packing.pack_q4_1, packing.Q4_EIGHT),
    "q8_0": (q8_0, packing.pack_q8_0, packing.Q8),
    "bf16": (bf16, packing.pack_bf16, library.BF16),
}
