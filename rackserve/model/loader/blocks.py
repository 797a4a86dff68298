"""Quantised matrices of a converted GGUF file, with the very bits they had in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from rackserve.base.errors import FileFormatError
from rackserve.model.loader.folder import BLOCKS_FILE as BLOCKS_FILE

BLOCK_BYTES = {"q4_1": 20, "q8_0": 34}
"""Bytes of a block in the formats that kernels read."""

GROUP = 32
"""Numbers of a block."""

REMEDY = "remove this file (the weights beside it serve alone), or the whole folder if rackserve made it"


class Blocks:
    """Those of a folder, if it has any. FileFormatError naming the file, and the tensor that is no matrix of blocks."""

    __slots__ = ("_found", "_path")

    def __init__(self, folder: Path) -> None:
        self._path = folder / BLOCKS_FILE
        self._found: dict[str, tuple[str, NDArray[np.uint8]]] = {}
        if not self._path.exists():
            return
        try:
            with safe_open(str(self._path), framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    name, _, kind = key.rpartition(".")
                    stored = file.get_slice(key)
                    self._check(name, kind, stored.get_dtype(), stored.get_shape())
                    self._found[name] = (kind, file.get_tensor(key))
        except (SafetensorError, OSError) as error:
            raise FileFormatError(f"{self._path}: cannot be read ({error}); {REMEDY}") from error

    def find(self, parts: Sequence[tuple[str, int]], inner: int) -> tuple[str, list[NDArray[np.uint8]]] | None:
        """Kind and blocks of matrices (name, rows) of `inner` columns that are multiplied together; None unless all are there.

        FileFormatError if one has another shape, or they are of several kinds.
        """
        if any(name not in self._found for name, _ in parts):
            return None
        found = {name: self._found[name] for name, _ in parts}
        for name, rows in parts:
            kind, blocks = found[name]
            # Numbers, not groups: of 40 columns there is no whole number of these.
            if (blocks.shape[0], blocks.shape[1] * GROUP) != (rows, inner):
                shape = f"{list(blocks.shape)}, {blocks.shape[0]} x {blocks.shape[1] * GROUP} numbers"
                problem = f"has shape {shape}, config.json asks for {rows} x {inner}"
                raise self._error(f"{name}.{kind}", problem, "use matching files")
        if len({kind for kind, _ in found.values()}) > 1:
            kinds = ", ".join(f"{name} is {kind}" for name, (kind, _) in found.items())
            raise FileFormatError(
                f"{self._path}: matrices that are multiplied together must be of one kind, but {kinds}; {REMEDY}"
            )
        return next(iter(found.values()))[0], [blocks for _, blocks in found.values()]

    def _check(self, name: str, kind: str, dtype: str, shape: Sequence[int]) -> None:
        """FileFormatError unless that is a matrix of blocks that kernels read, the only one of its name."""
        if kind not in BLOCK_BYTES:
            raise self._error(f"{name}.{kind}", f"is of kind {kind!r}, known are {', '.join(BLOCK_BYTES)}")
        if dtype != "U8" or len(shape) != 3 or shape[2] != BLOCK_BYTES[kind]:
            wanted = f"U8 [rows, groups, {BLOCK_BYTES[kind]}]"
            raise self._error(f"{name}.{kind}", f"is {dtype} {list(shape)}, wanted is {wanted}")
        if name in self._found:
            raise self._error(f"{name}.{kind}", f"is there as {self._found[name][0]}, too")

    def _error(self, tensor: str, problem: str, remedy: str = REMEDY) -> FileFormatError:
        return FileFormatError(f"{self._path}: tensor {tensor} {problem}; {remedy}")
