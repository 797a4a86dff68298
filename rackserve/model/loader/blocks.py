"""Quantised matrices of a converted GGUF file, with the very bits they had in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from rackserve.base.errors import FileFormatError

BLOCKS_FILE = "quantised.blocks"
"""Beside the weights of a model folder, in safetensors form: uint8 [rows, groups, bytes of a block], under name.kind."""

BLOCK_BYTES = {"q4_1": 20, "q8_0": 34}
"""Bytes of a block of 32 numbers in the formats that kernels read."""


class Blocks:
    """Those of a folder, if it has any. FileFormatError if its file cannot be read."""

    __slots__ = ("_found",)

    def __init__(self, folder: Path) -> None:
        path = folder / BLOCKS_FILE
        self._found: dict[str, tuple[str, NDArray[np.uint8]]] = {}
        if not path.exists():
            return
        try:
            with safe_open(str(path), framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    name, _, kind = key.rpartition(".")
                    self._found[name] = (kind, file.get_tensor(key))
        except (SafetensorError, OSError) as error:
            raise FileFormatError(f"{path}: cannot be read ({error}); remove the folder, it is made again") from error

    def find(self, names: Sequence[str]) -> tuple[str, list[NDArray[np.uint8]]] | None:
        """Kind and blocks of the matrices, if all are there and of one kind."""
        parts = [self._found[name] for name in names if name in self._found]
        kinds = {kind for kind, _ in parts}
        if len(parts) < len(names) or len(kinds) != 1:
            return None
        return kinds.pop(), [part for _, part in parts]
