"""The built kernels of this machine, through ctypes."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, c_char_p, c_int32, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rackserve.base.errors import ConfigError, ResourceError
from rackserve.kernels.cpu.build import BUILT, compiler, is_sealed
from rackserve.kernels.cpu.choice import FASTER_FOR_LLAMA, NEEDED, SPELLINGS, VARIABLE, asked_for, chosen, features, file_of
from rackserve.kernels.cpu.packing import BF16, GROUP, LANES, Bytes

ABI = 6

BUILD = "python -m rackserve.kernels.cpu.build"
"""What builds the kernels again."""

Floats = NDArray[np.float32]

PICK = "if"
"""`RkPick` of src/pick.h: a token and its logit."""


class MatrixView(Structure):
    """`Matrix` of src/matrix.h."""

    _fields_ = (("data", c_void_p), ("kind", c_int32), ("outputs", c_int32), ("inputs", c_int32))


class Library:
    """One loaded variant. `path`: the instruction set it was built for. ConfigError if the file is not what was built."""

    def __init__(self, file: Path) -> None:
        self.c = _load(file)
        self.c.rk_path.restype = c_char_p
        self.path: str = self.c.rk_path().decode()
        self.c.rk_product.argtypes = [POINTER(MatrixView), c_void_p, c_int32, c_void_p]
        self.c.rk_unpack_row.argtypes = [POINTER(MatrixView), c_int32, c_void_p]
        self.c.rk_pick.argtypes = [c_void_p, c_int32, c_int32, c_void_p]
        self.c.rk_decoder_new.restype = c_void_p
        self.c.rk_decoder_new.argtypes = [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p]
        self.c.rk_decoder_free.argtypes = [c_void_p]
        self.c.rk_decoder_forward.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
        self.c.rk_decoder_logits.argtypes = [c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_int32]
        self.c.rk_decoder_time.argtypes = [c_void_p, c_int32]
        self.c.rk_decoder_times.argtypes = [c_void_p, c_void_p]
        self.c.rk_stage_name.restype = c_char_p

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the parts of a step that `Decoder.times` tells apart."""
        names: list[str] = []
        while name := self.c.rk_stage_name(len(names)):
            names.append(name.decode())
        return tuple(names)

    def product(self, packed: Bytes, kind: int, rows: Floats) -> Floats:
        """`rows` [n, inputs] times the matrix: float32 [n, outputs]. Q4 and Q8 round rows to 16 bits, Q4_EIGHT to 8."""
        view = view_of(packed, kind)
        out = np.empty((len(rows), view.outputs), np.float32)
        given = np.ascontiguousarray(rows, np.float32)
        self.c.rk_product(view, given.ctypes.data, len(rows), out.ctypes.data)
        return out

    def row(self, packed: Bytes, kind: int, output: int) -> Floats:
        """One row of the matrix: float32 [inputs]."""
        view = view_of(packed, kind)
        out = np.empty(view.inputs, np.float32)
        self.c.rk_unpack_row(view, output, out.ctypes.data)
        return out

    def pick(self, parts: Sequence[Floats]) -> tuple[int, float]:
        """The likeliest token of a row whose logits come in `parts`, multiples of 16, and its logit: as in `Decoder.pick`."""
        best, first = (ctypes.c_char * struct.calcsize(PICK))(), 0
        self.c.rk_pick(None, 0, 0, best)
        for part in parts:
            self.c.rk_pick(part.ctypes.data, len(part), first, best)
            first += len(part)
        token, logit = struct.unpack(PICK, best)
        return token, logit


def _load(file: Path) -> ctypes.CDLL:
    """Load a file, after a look at all of it: a part that is missing would end the process at its first use."""
    try:
        if not is_sealed(file):
            raise ConfigError(_unusable(file, "not whole, or built by another version"))
        loaded = ctypes.CDLL(str(file))
        abi = loaded.rk_abi()
    except (OSError, AttributeError) as error:
        raise ConfigError(_unusable(file, str(getattr(error, "strerror", None) or error))) from error
    if abi != ABI:
        raise ConfigError(_unusable(file, "built from other sources"))
    return loaded


def _unusable(file: Path, why: str) -> str:
    return f"{file} cannot be loaded ({why}); run {BUILD}, or name another variant in {VARIABLE}"


def no_room(positions: int, threads: int) -> ResourceError:
    """Why the system refused a step's buffers and threads, as far as it told."""
    buffers = f"no memory for the buffers of a step of {positions} positions: lower scheduler.max_tokens"
    return ResourceError(buffers if threads <= 1 else f"{buffers}; or no room for {threads} threads: lower runner.threads")


def places(cores: Sequence[int], threads: int) -> Array[c_int32] | None:
    """Where each of `threads` runs, as C wants it: the first of `cores`; None: too few, wherever the system wants."""
    return (c_int32 * threads)(*cores[:threads]) if len(cores) >= threads else None


def view_of(packed: Bytes, kind: int) -> MatrixView:
    """A packed matrix as C sees it; `packed` must outlive it."""
    tiles, groups, _ = packed.shape
    return MatrixView(packed.ctypes.data, kind, tiles * LANES, groups * GROUP)


@cache
def find() -> Library | None:
    """The best variant that was built and that this processor runs; None if there is none, or none is wanted.

    ConfigError if its file cannot be loaded: another would do, but more slowly, and nobody would know.
    """
    name = chosen(BUILT)
    return Library(BUILT / file_of(name)) if name else None


def found() -> tuple[bool, str]:
    """Whether models can compute with kernels, and with which or why not, in words with the remedy. ConfigError as `find`."""
    library = find()
    if library is not None:
        asked = os.environ.get(VARIABLE)
        return True, f"{library.path}, {f'as {VARIABLE} says' if asked else 'the best of those built that this processor runs'}"
    return False, missing()


def slower_for_llama() -> str:
    """Why Llama is left to torch though `find` finds something, with the remedy; "" if it is not."""
    library = find()
    if library is None or SPELLINGS.get(library.path, library.path) in FASTER_FOR_LLAMA:
        return ""
    return f"for Llama {library.path} kernels are slower still; runner.kernels=native takes them all the same"


def missing() -> str:
    """Why `find` finds nothing, with the remedy."""
    if asked_for() == "none":
        return f"native kernels are off, as {VARIABLE}=none says; unset it"
    built = [name for name in NEEDED if (BUILT / file_of(name)).exists()]
    if built:
        return f"no native kernels were built for this processor, only {', '.join(built)}; run {BUILD}"
    lack, remedy = ("", "") if compiler() else (", for lack of a compiler", "install g++, then ")
    return f"no native kernels were built here{lack}; {remedy}run {BUILD}"


__all__ = [
    "ABI",
    "BF16",
    "NEEDED",
    "VARIABLE",
    "Library",
    "MatrixView",
    "features",
    "find",
    "found",
    "missing",
    "no_room",
    "slower_for_llama",
    "view_of",
]
