"""Which files of a Hugging Face folder hold its weights; no tensor is touched, so this needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rackserve.base.errors import FileFormatError
from rackserve.model.config import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
BLOCKS_FILE = "quantised.blocks"
"""Beside the weights of a model folder, in safetensors form: uint8 [rows, groups, bytes of a block], under name.kind."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder in name order. FileFormatError if there are none or a shard is missing."""
    index = folder / INDEX_NAME
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
    elif (folder / SINGLE_NAME).exists():
        names = [SINGLE_NAME]
    else:
        raise FileFormatError(f"{folder}: holds neither {SINGLE_NAME} nor {INDEX_NAME}; name a folder with safetensors weights")
    for name in names:
        if not (folder / name).is_file():
            raise FileFormatError(f"{folder / name}: shard named in {INDEX_NAME} is missing; fetch it again")
    return [folder / name for name in names]


def _weight_map(index: Path) -> Mapping[str, str]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        raise FileFormatError(f"{index}: field weight_map must map tensor names to file names; fetch the file again")
    return mapping
