"""A checkpoint folder of the released layout, mapped read-only and checked tensor by tensor before use. No torch needed."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.model.config import read_json
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.inventory import TensorSpec, inventory, is_skipped
from rackserve.model.loader.folder import INDEX_NAME, weight_files

MAX_HEADER_BYTES = 100_000_000
"""Longest header that the safetensors format allows."""

ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes per element by safetensors tag."""


class Entry(msgspec.Struct, frozen=True):
    """Where a tensor lies: `num_bytes` from `offset` of the file at `path`, as its header says."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Checkpoint:
    """The tensors of one folder by name, all of them checked. What was read stays valid for as long as it is referred to."""

    __slots__ = ("_entries", "_maps", "config", "tensors")

    def __init__(self, config: DeepseekV41Config, tensors: dict[str, TensorSpec], entries: dict[str, Entry]) -> None:
        self.config = config
        self.tensors = tensors
        self._entries = entries
        self._maps: dict[Path, mmap.mmap] = {}

    def location(self, name: str) -> tuple[Path, int, int]:
        """(file, offset, bytes) of a tensor. KeyError if the model has none of that name."""
        entry = self._entries[name]
        return entry.path, entry.offset, entry.num_bytes

    def view(self, name: str) -> memoryview:
        """The bytes of a tensor on read-only pages that all processes share. KeyError if the model has none of that name."""
        entry = self._entries[name]
        if entry.path not in self._maps:
            self._maps[entry.path] = _map(entry.path)
        return memoryview(self._maps[entry.path])[entry.offset : entry.offset + entry.num_bytes]


def open_checkpoint(folder: Path, config: DeepseekV41Config) -> Checkpoint:
    """The checkpoint in `folder`: one file, or shards named by an index.

    FileFormatError, with file and tensor, if any tensor of the model is missing, misshapen, of another number format or not
    wholly in its file, if one is unknown, or if a file is truncated or no safetensors file.
    """
    entries: dict[str, Entry] = {}
    paths = weight_files(folder)
    for path in paths:
        for name, entry in read_header(path).items():
            if name in entries:
                raise FileFormatError(f"{path}: tensor {name} is in {entries[name].path.name} too; keep one of them")
            entries[name] = entry
    if (folder / INDEX_NAME).exists():
        _check_index(folder / INDEX_NAME, entries)
    tensors = inventory(config)
    for name, spec in tensors.items():
        _check_tensor(name, spec, entries, folder if len(paths) > 1 else paths[0])
    unknown = next((name for name in entries if name not in tensors and not is_skipped(name)), None)
    if unknown is not None:
        raise FileFormatError(
            f"{entries[unknown].path}: tensor {unknown} belongs to no model of this config.json; use matching files"
        )
    return Checkpoint(config, tensors, {name: entries[name] for name in tensors})


def _check_index(index: Path, entries: dict[str, Entry]) -> None:
    """Every tensor must be in the shard that the index names."""
    named: dict[str, str] = read_json(index)["weight_map"]
    for name, shard in named.items():
        if name not in entries or entries[name].path.name != shard:
            raise FileFormatError(
                f"{index.parent / shard}: lacks tensor {name}, which {INDEX_NAME} says is there; fetch both again"
            )
    for name, entry in entries.items():
        if name not in named:
            raise FileFormatError(f"{index}: does not name tensor {name} of {entry.path.name}; fetch both again")


def _check_tensor(name: str, spec: TensorSpec, entries: dict[str, Entry], where: Path) -> None:
    entry = entries.get(name)
    if entry is None:
        weight = f"{name.removesuffix('.scale')}.weight"
        if name.endswith(".scale") and weight in entries:
            raise FileFormatError(
                f"{entries[weight].path}: tensor {weight} comes without its scale {name}; fetch the weights again"
            )
        raise FileFormatError(f"{where}: tensor {name} of shape {list(spec.shape)} is missing; fetch the weights again")
    if entry.shape != spec.shape:
        raise FileFormatError(
            f"{entry.path}: tensor {name} has shape {list(entry.shape)}, config.json asks for {list(spec.shape)}; "
            "use matching files"
        )
    if entry.dtype != spec.dtype:
        raise FileFormatError(
            f"{entry.path}: tensor {name} is {entry.dtype}, the released layout stores {spec.dtype}; use weights in that layout"
        )


# ---------------------------------------------------------------- one file


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file: 8 bytes of length, a JSON header, then the tensors without gaps or overlaps."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            if len(prefix) < 8:
                _refuse(path, f"truncated: {size} bytes do not even hold the length of a header")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                _refuse(path, f"no safetensors file: a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed")
            if 8 + length > size:
                _refuse(path, f"truncated: a header of {length} bytes in a file of {size}")
            header = file.read(length)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}); fetch it again") from error
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in _parse(path, header) if name != "__metadata__"}
    _check_extent(path, entries, 8 + length, size)
    return entries


def _parse(path: Path, header: bytes) -> Iterator[tuple[str, Any]]:
    """(name, fields) of every entry of the header."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = sorted(name for name, _ in pairs)
            raise ValueError(f"{next(name for name, after in pairwise(names) if name == after)} comes twice")
        return fields

    try:
        fields = json.loads(header, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"no safetensors file: its header is not valid JSON ({error})")
    if not isinstance(fields, dict):
        _refuse(path, f"no safetensors file: its header is a JSON {type(fields).__name__}, not an object")
    yield from fields.items()


def _entry(path: Path, name: str, fields: Any, data_offset: int) -> Entry:
    """A header's entry for `name`, with the offset from the start of the file."""
    if not isinstance(fields, dict):
        _refuse(path, f"tensor {name} is described by {fields!r:.40}, not by dtype, shape and data_offsets")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        _refuse(path, f"tensor {name} has dtype {dtype!r:.40}, which is unknown")
    sizes, extent = _counts(shape), _counts(offsets)
    if sizes is None:
        _refuse(path, f"tensor {name} has shape {shape!r:.80}, which is no list of sizes")
    if extent is None or len(extent) != 2 or extent[0] > extent[1]:
        _refuse(path, f"tensor {name} has data_offsets {offsets!r:.80}, which are no begin and end")
    begin, end = extent
    wanted = prod(sizes) * ELEMENT_BYTES[dtype]
    if end - begin != wanted:
        _refuse(path, f"tensor {name} takes {end - begin} bytes, but {dtype} of shape {shape!r:.80} takes {wanted}")
    return Entry(path, dtype, sizes, data_offset + begin, wanted)


def _counts(value: Any) -> tuple[int, ...] | None:
    """`value` if it is a list of whole numbers from 0 on, of 63 bits at most."""
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
        return None
    return tuple(value)


def _check_extent(path: Path, entries: dict[str, Entry], begin: int, size: int) -> None:
    """The tensors must follow each other from `begin` to the end of the file."""
    last, ordered = "the header", sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes))
    for name, entry in ordered:
        if entry.offset + entry.num_bytes > size:
            missing = entry.offset + entry.num_bytes - size
            _refuse(path, f"truncated: tensor {name} reaches {missing} bytes beyond the end of the file ({size} bytes)")
    for name, entry in ordered:
        if entry.offset < begin:
            _refuse(path, f"tensor {name} overlaps {last} by {begin - entry.offset} bytes")
        if entry.offset > begin:
            _refuse(path, f"{entry.offset - begin} bytes between {last} and tensor {name} belong to nothing")
        last, begin = f"tensor {name}", begin + entry.num_bytes
    if begin < size:
        _refuse(path, f"{size - begin} bytes after {last} belong to nothing")


def _refuse(path: Path, problem: str) -> NoReturn:
    raise FileFormatError(f"{path}: {problem}; fetch the file again")


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: cannot be mapped into memory ({error}); fetch the file again") from error
