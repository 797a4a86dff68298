"""The stored rows of Engram tables, mapped from the checkpoint: one copy per machine, and only what is read takes memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from os import fstat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rackserve.base.errors import FileFormatError
from rackserve.model.deepseek_v41.config import DeepseekV41Config

Location = tuple[Path, int, int]
"""(file, offset, bytes) of a stored tensor."""

RowIds = NDArray[np.int64]

Rows = NDArray[np.uint8]
"""[n, row_bytes]: in each the e4m3 values, then an e8m0 scale per 32 of them."""

SCALED = 32
"""Values that share a scale."""

_BLOCK = 512
"""Rows handled at once, so that they are still in the processor's cache when they are used again."""


def row_bytes(dim: int) -> int:
    """Bytes of a stored row of `dim` values."""
    return dim + dim // SCALED


class EngramTable:
    """The table of one layer: values e4m3 [num_rows, dim] and scales e8m0 [num_rows, dim / 32] at the given places.

    FileFormatError if a file is too short or the two do not belong together.
    """

    __slots__ = ("_scales", "_values", "dim", "num_rows")

    def __init__(self, values: Location, scales: Location, dim: int) -> None:
        self.dim, self.num_rows = dim, values[2] // dim
        if values[2] != self.num_rows * dim or scales[2] * SCALED != values[2] or not self.num_rows:
            raise FileFormatError(
                f"{values[0]}: an Engram table of {values[2]} bytes and {scales[2]} bytes of scales has no rows of {dim}; use "
                "weights and config.json of the same model"
            )
        self._values = _mapped(values).reshape(self.num_rows, dim)
        self._scales = _mapped(scales).reshape(self.num_rows, dim // SCALED)

    def read(self, rows: RowIds) -> Rows:
        """Copies of `rows` [n], in their order. IndexError outside the table."""
        result = np.empty((len(rows), row_bytes(self.dim)), np.uint8)
        for at in range(0, len(rows), _BLOCK):
            block, ids = result[at : at + _BLOCK], rows[at : at + _BLOCK]
            block[:, : self.dim] = self._values.take(ids, 0)
            block[:, self.dim :] = self._scales.take(ids, 0)
        return result


def open_tables(location: Callable[[str], Location], config: DeepseekV41Config) -> dict[int, EngramTable]:
    """The tables by layer; `location` says where the checkpoint holds a tensor. FileFormatError if they do not fit `config`."""
    tables = {}
    for layer, num_rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        values, scales = (location(f"layers.{layer}.engram.embed.{part}") for part in ("weight", "scale"))
        tables[layer] = EngramTable(values, scales, config.engram_head_dim)
        if tables[layer].num_rows != num_rows:
            raise FileFormatError(
                f"{values[0]}: layers.{layer}.engram.embed.weight has {tables[layer].num_rows} rows, config.json asks for "
                f"{num_rows} (engram_num_embeddings); use matching files"
            )
    return tables


def dequantise(rows: Rows, dim: int) -> NDArray[np.float32]:
    """[n, dim] values times the powers of two of their scales; exact wherever float32 is."""
    result = np.empty((len(rows), dim), np.float32)
    for at in range(0, len(rows), _BLOCK):
        block, stored = result[at : at + _BLOCK], rows[at : at + _BLOCK]
        # Two values at a time: half as many look-ups.
        np.take(_PAIRS, stored[:, :dim].view(np.uint16), out=block.view(np.uint64), mode="clip")
        grouped = block.reshape(len(block), dim // SCALED, SCALED)
        grouped *= _SCALES[stored[:, dim:], None]
    return result


def _mapped(location: Location) -> NDArray[np.uint8]:
    path, offset, num_bytes = location
    try:
        with path.open("rb") as file:
            if fstat(file.fileno()).st_size < offset + num_bytes:
                raise FileFormatError(f"{path}: ends before byte {offset + num_bytes}; fetch it again")
            skipped = offset % mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(file.fileno(), num_bytes + skipped, offset=offset - skipped, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}); fetch it again") from error
    # Rows are wanted in no order: reading ahead would fill the memory with others.
    mapping.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapping, np.uint8, num_bytes, skipped)


def _e4m3() -> NDArray[np.float32]:
    """Value of each of the 256 codes: sign, 4 bits of exponent (bias 7), 3 bits of fraction; all ones is not a number."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    size[code & 127 == 127] = np.nan
    return np.asarray(np.where(code & 128, -size, size), np.float32)


def _e8m0() -> NDArray[np.float32]:
    """Power of two of each of the 256 codes; 255 is not a number."""
    powers = np.ldexp(np.float64(1), np.arange(256) - 127)
    powers[255] = np.nan
    return np.asarray(powers, np.float32)


_SCALES = _e8m0()
_PAIRS = np.stack(np.broadcast_arrays(_e4m3()[None, :], _e4m3()[:, None]), -1).reshape(-1, 2).view(np.uint64).ravel()
"""Both values of two codes, the first code in the low byte."""
