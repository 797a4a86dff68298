"""Memory with an end: reading or writing past it stops the process; what is written in front of it is found afterwards."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

PAGE = mmap.PAGESIZE
POISON = 0xFF
"""Of memory that nobody wrote: NaN as float32, float64, bf16, e4m3 and scale, -1 as a whole number."""

CANARY = 0xC5
_NOTHING, _READ = 0, 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Fence:
    """Arrays each of which ends at a page that nobody may touch."""

    def __init__(self) -> None:
        self._fronts: list[NDArray[np.uint8]] = []

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Poison."""
        return self._take(shape, dtype)[0]

    def copy(self, values: NDArray[Any], *, writable: bool = False) -> NDArray[Any]:
        """The same numbers. Unless `writable`, whoever writes to them stops the process."""
        array, pages = self._take(values.shape, values.dtype)
        array[...] = values
        if not writable and array.nbytes:
            _protect(pages[PAGE:-PAGE], _READ)
        return array

    def _take(self, shape: int | Sequence[int], dtype: DTypeLike) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        inside = -(-max(size, 1) // PAGE) * PAGE
        pages = np.frombuffer(mmap.mmap(-1, inside + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        front, data = pages[PAGE : PAGE + inside - size], pages[PAGE + inside - size : PAGE + inside]
        front[:], data[:] = CANARY, POISON
        _protect(pages[:PAGE], _NOTHING)
        _protect(pages[-PAGE:], _NOTHING)
        self._fronts.append(front[-64:])
        return data.view(dtype).reshape(shape), pages

    def check(self) -> None:
        """Nothing was written in front of an array."""
        for front in self._fronts:
            assert (front == CANARY).all(), "something was written in front of an array"


def _protect(pages: NDArray[np.uint8], how: int) -> None:
    assert _LIBC.mprotect(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.nbytes), how) == 0
