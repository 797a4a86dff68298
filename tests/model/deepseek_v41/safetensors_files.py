"""Checkpoint files of the tests: read into a header and bytes, written again with something changed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from rackserve.model.deepseek_v41.config import DeepseekV41Config, read_config
from rackserve.model.loader.folder import INDEX_NAME, SINGLE_NAME

GOLDEN = Path(__file__).parents[2] / "golden" / "deepseek_v41_tiny"

Header = dict[str, dict[str, Any]]


def golden_config() -> DeepseekV41Config:
    return read_config(GOLDEN / "config.json")


def read_file(path: Path) -> tuple[Header, bytes]:
    """(header without metadata, the bytes after it)."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, content[8 + length :]


def write_header(path: Path, header: object, data_bytes: int) -> None:
    """A file with this header whose data are `data_bytes` zeros that take no space on the disk."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("ab") as file:
        file.truncate(8 + len(text) + data_bytes)


def write_tensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], pad: int = 0) -> None:
    """Tensors as (dtype, shape, bytes), in this order; the header is `pad` bytes longer than it must be."""
    header, begin = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(content)]}
        begin += len(content)
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(content for _, _, content in tensors.values()))


def golden_tensors() -> dict[str, tuple[str, list[int], bytes]]:
    header, data = read_file(GOLDEN / SINGLE_NAME)
    return {name: (fields["dtype"], fields["shape"], data[slice(*fields["data_offsets"])]) for name, fields in header.items()}


def write_shards(folder: Path, num_shards: int) -> dict[str, str]:
    """The golden checkpoint in shards with an index; returns the index's map."""
    tensors = golden_tensors()
    shutil.copy(GOLDEN / "config.json", folder)
    named = {}
    for number in range(num_shards):
        shard = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        names = sorted(tensors)[number::num_shards]
        write_tensors(folder / shard, {name: tensors[name] for name in names})
        named |= dict.fromkeys(names, shard)
    write_index(folder, named)
    return named


def write_index(folder: Path, named: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": named}))


def kinds() -> list[str]:
    """One tensor of each kind in the golden checkpoint: the first of those alike but for numbers."""
    header, _ = read_file(GOLDEN / SINGLE_NAME)
    found: dict[str, str] = {}
    for name in sorted(header):
        found.setdefault(re.sub(r"\d+", "N", name.replace("mtp.", "layers.")), name)
    return list(found.values())
