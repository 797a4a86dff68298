"""Weight matrices into the order in which the kernels read them (src/matrix.h), from the blocks of a GGUF file or from bf16.

Nothing is rounded: Q4_1 and Q8_0 blocks keep their bits.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np
from numpy.typing import NDArray

from rackserve.base.errors import ConfigError

LANES = 16
GROUP = 32
Q4, Q8, BF16, Q4_EIGHT = 0, 1, 2, 3
"""`Kind` of src/matrix.h. Q4_EIGHT is packed as Q4; what is multiplied by it is rounded to 8 bits instead of 16."""

Bytes = NDArray[np.uint8]

HUGE_PAGE = 2 << 20
SLAB = 32 << 20
LINE = 64


class _Slabs:
    """Memory on huge pages, handed out of large pieces. A piece goes when all that lies in it has gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.empty(0, np.uint8)

    def take(self, size: int) -> Bytes:
        whole = -(-size // LINE) * LINE
        with self._lock:
            if whole > len(self._rest):
                length = max(SLAB, -(-whole // HUGE_PAGE) * HUGE_PAGE)
                slab = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    with contextlib.suppress(OSError):  # a system without huge pages: slower, no less right
                        slab.madvise(mmap.MADV_HUGEPAGE)
                self._rest = np.frombuffer(slab, np.uint8)
            taken, self._rest = self._rest[:size], self._rest[whole:]
        return taken


_SLABS = _Slabs()


def fresh(size: int) -> Bytes:
    """`size` bytes that begin on a cache line, on huge pages: weights are read in long runs, and small pages slow that down."""
    return _SLABS.take(size)


def pack_q4_1(blocks: Bytes) -> Bytes:
    """Q4_1 blocks [outputs, inputs / 32, 20] (half scale, half offset, 16 bytes of nibbles) -> [tiles, groups, 320]."""
    lanes = _tiles(blocks, 20)
    tiles, groups = lanes.shape[0], lanes.shape[2]
    packed = fresh(tiles * groups * 320).reshape(tiles, groups, 320)
    nibbles = lanes[..., 4:].reshape(tiles, LANES, groups, 4, 4).transpose(0, 2, 3, 1, 4)
    packed[..., :256] = nibbles.reshape(tiles, groups, 256)
    packed[..., 256:288] = lanes[..., 0:2].transpose(0, 2, 1, 3).reshape(tiles, groups, 32)
    packed[..., 288:] = lanes[..., 2:4].transpose(0, 2, 1, 3).reshape(tiles, groups, 32)
    return packed


def pack_q8_0(blocks: Bytes) -> Bytes:
    """Q8_0 blocks [outputs, inputs / 32, 34] (half scale, 32 signed bytes) -> [tiles, groups, 576]."""
    lanes = _tiles(blocks, 34)
    tiles, groups = lanes.shape[0], lanes.shape[2]
    packed = fresh(tiles * groups * 576).reshape(tiles, groups, 576)
    values = lanes[..., 2:]
    packed[..., :512] = values.reshape(tiles, LANES, groups, 8, 4).transpose(0, 2, 3, 1, 4).reshape(tiles, groups, 512)
    packed[..., 512:544] = lanes[..., 0:2].transpose(0, 2, 1, 3).reshape(tiles, groups, 32)
    sums = np.ascontiguousarray(values).view(np.int8).sum(-1, dtype=np.int16).transpose(0, 2, 1)
    packed[..., 544:] = np.ascontiguousarray(sums).view(np.uint8)
    return packed


def pack_bf16(weights: NDArray[np.uint16]) -> Bytes:
    """bf16 weights as bits [outputs, inputs] -> [tiles, groups, 1024]."""
    outputs, inputs = weights.shape
    _check(outputs, inputs)
    packed = fresh(outputs * inputs * 2)
    packed.view(np.uint16).reshape(outputs // LANES, inputs, LANES)[:] = weights.reshape(-1, LANES, inputs).transpose(0, 2, 1)
    return packed.reshape(outputs // LANES, inputs // GROUP, 1024)


def _tiles(blocks: Bytes, size: int) -> Bytes:
    outputs, groups, found = blocks.shape
    assert found == size, f"blocks of {found} bytes, expected {size}"
    _check(outputs, groups * GROUP)
    return blocks.reshape(outputs // LANES, LANES, groups, size)


def _check(outputs: int, inputs: int) -> None:
    if outputs % LANES or inputs % GROUP:
        raise ConfigError(f"a matrix of {outputs} x {inputs} cannot be packed: outputs come in {LANES}s, inputs in {GROUP}s")
