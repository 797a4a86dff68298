"""Small Engram tables for tests: the golden checkpoint's, and made-up ones of 1,009 rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import rackserve.model.deepseek_v41
from rackserve.model.deepseek_v41.config import DeepseekV41Config, read_config
from rackserve.model.deepseek_v41.engram.tables import EngramTable, Location, Rows

GOLDEN = Path(__file__).parents[3] / "golden" / "deepseek_v41_tiny"
NUM_ROWS, DIM = 1009, 32
LAYERS = (1, 3)


def tiny_config() -> DeepseekV41Config:
    return read_config(GOLDEN / "config.json")


def flash_config() -> DeepseekV41Config:
    return read_config(Path(rackserve.model.deepseek_v41.__file__).with_name("flash.json"))


def golden_location(name: str) -> Location:
    """Where the golden file holds a tensor: 8 bytes with the header's length, the header, the tensors."""
    path = GOLDEN / "model.safetensors"
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(size))[name]["data_offsets"]
    return path, 8 + size + begin, end - begin


def stored(layer: int) -> Rows:
    """[1009, 33]: every row different, scales near 1, no code that is not a number."""
    draw = np.random.default_rng(layer)
    return np.concatenate(
        (draw.integers(0, 127, (NUM_ROWS, DIM), np.uint8), draw.integers(120, 135, (NUM_ROWS, 1), np.uint8)), axis=1
    )


def made_up(folder: Path) -> dict[int, EngramTable]:
    """The tables of `stored`, in files that hold other bytes before and after them."""
    tables = {}
    for layer in LAYERS:
        rows, path = stored(layer), folder / f"table{layer}"
        values, scales = rows[:, :DIM].tobytes(), rows[:, DIM:].tobytes()
        path.write_bytes(b"#" * 5001 + values + b"#" * 3 + scales + b"#")
        tables[layer] = EngramTable((path, 5001, len(values)), (path, 5001 + len(values) + 3, len(scales)), DIM)
    return tables


def plain_values(rows: Rows) -> NDArray[np.float32]:
    """What rows of one scale mean, one value at a time."""

    def value(code: int, scale: int) -> float:
        exponent, fraction = code >> 3 & 15, code & 7
        size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
        return (-size if code & 128 else size) * 2.0 ** (scale - 127)

    return np.array([[value(int(code), int(row[-1])) for code in row[:-1]] for row in rows], np.float32)
