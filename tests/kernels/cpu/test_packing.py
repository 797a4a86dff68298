from __future__ import annotations

import numpy as np
import pytest

from rackserve.base.errors import ConfigError
from rackserve.kernels.cpu import packing
from tests.kernels.cpu.variants import ALL, KINDS, load


@ALL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 96), (32, 576)])
def test_a_packed_matrix_is_the_matrix_to_the_last_bit(name: str, kind: str, outputs: int, inputs: int) -> None:
    make, pack, code = KINDS[kind]
    stored, matrix = make(np.random.default_rng(1), outputs, inputs)
    packed = pack(stored)  # type: ignore[operator]
    for row in {0, 1, 15, 16 % outputs, outputs - 1}:
        assert np.array_equal(load(name).row(packed, code, row), matrix[row])


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_that_lanes_cannot_hold_are_refused(kind: str) -> None:
    make, pack, _ = KINDS[kind]
    stored, _matrix = make(np.random.default_rng(1), 24, 64)
    with pytest.raises(ConfigError, match="24 x 64"):
        pack(stored)  # type: ignore[operator]


def test_weights_lie_beside_each_other_and_none_in_another() -> None:
    parts = [packing.fresh(size) for size in (100, 1, packing.SLAB - 64, 640, packing.SLAB + 1, 64)]
    for value, part in enumerate(parts):
        assert part.ctypes.data % packing.LINE == 0
        part[[0, -1]] = value + 1
    assert [(part[0], part[-1]) for part in parts] == [(value + 1, value + 1) for value in range(len(parts))]
    assert parts[1].ctypes.data - parts[0].ctypes.data == 2 * packing.LINE
