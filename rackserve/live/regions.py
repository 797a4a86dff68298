"""Shared memory for KV: anonymous memory files of the control process, which vanish with the last process that uses them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rackserve.base.errors import ResourceError
from rackserve.base.kv_layout import KvLayout
from rackserve.base.units import MIB


class RegionShape(msgspec.Struct, frozen=True):
    """How many KV slots of each kind a region holds, and their sizes in bytes: first all full slots, then the window slots."""

    num_slots: int
    num_window_slots: int
    block_bytes: int
    window_bytes: int

    @classmethod
    def of(cls, layout: KvLayout, num_slots: int, num_window_slots: int) -> RegionShape:
        return cls(num_slots, num_window_slots if layout.has_window else 0, layout.block_bytes, layout.window_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.block_bytes + self.num_window_slots * self.window_bytes


class RegionFile(msgspec.Struct, frozen=True):
    """Where another process of the same user finds region `name`: descriptor `fd` of process `pid`."""

    name: str
    shape: RegionShape
    pid: int
    fd: int


class MappedRegion:
    """A region mapped into this process, at `address`, until `close`."""

    __slots__ = ("_anchor", "_mapping", "address", "shape")

    def __init__(self, fd: int, shape: RegionShape) -> None:
        self.shape = shape
        self._mapping = mmap.mmap(fd, shape.num_bytes)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._mapping)
        self.address = ctypes.addressof(self._anchor)

    @property
    def memory(self) -> memoryview:
        """The bytes of the region, writable. `close` fails while such a view is alive."""
        return memoryview(self._mapping)

    def close(self) -> None:
        """Give the memory back; `address` must not be used any more."""
        self._anchor = None
        self._mapping.close()


def map_region(region: RegionFile) -> MappedRegion:
    """Map `region`. Raises ResourceError if its owner has dropped it (even if the descriptor now names something else)."""
    try:
        fd = os.open(f"/proc/{region.pid}/fd/{region.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ResourceError(f"region {region.name} is gone: {error.strerror}") from error
    try:
        if _memory_name(region.name) not in os.readlink(f"/proc/self/fd/{fd}"):
            raise ResourceError(f"region {region.name} is gone: its descriptor was used again")
        return MappedRegion(fd, region.shape)
    finally:
        os.close(fd)


class RegionOwner:
    """The regions of a rack, kept by its control process. Memory is taken when first touched, not at creation."""

    __slots__ = ("_files",)

    def __init__(self) -> None:
        self._files: dict[str, RegionFile] = {}

    def create(self, name: str, shape: RegionShape) -> RegionFile:
        """A new region of zeros. Raises ResourceError if `name` exists or memory is short."""
        if name in self._files:
            raise ResourceError(f"region {name} exists")
        check_memory(shape.num_bytes)
        fd = os.memfd_create(_memory_name(name), os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, shape.num_bytes)
        except OSError as error:
            os.close(fd)
            raise ResourceError(f"region {name} of {shape.num_bytes / MIB:,.0f} MiB: {error.strerror}") from error
        self._files[name] = RegionFile(name, shape, os.getpid(), fd)
        return self._files[name]

    def drop(self, name: str) -> None:
        """Forget a region; its memory is free once the processes that mapped it have closed it. Unknown names are ignored."""
        region = self._files.pop(name, None)
        if region is not None:
            os.close(region.fd)

    def table(self) -> tuple[RegionFile, ...]:
        return tuple(self._files.values())

    def close(self) -> None:
        for name in tuple(self._files):
            self.drop(name)


def check_memory(
    kv_bytes: int, model_bytes: int = 0, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> None:
    """Raise ResourceError if the machine or the container cannot hold KV and the models of the rank processes as well."""
    available = available_bytes(proc, cgroups)
    if kv_bytes + model_bytes > available:
        models = f" and the models of all ranks {model_bytes / MIB:,.0f} MiB" if model_bytes else ""
        raise ResourceError(
            f"KV needs {kv_bytes / MIB:,.0f} MiB of memory{models} but only {available / MIB:,.0f} MiB are available; "
            "lower topology.prefill_blocks, topology.decode_blocks or topology.segment_blocks, or have fewer workers"
        )


def available_bytes(proc: Path, cgroups: Path) -> int:
    """Bytes that can still be used: the least of the machine's MemAvailable and what the control groups (v1 or v2) leave."""
    lines = (proc / "meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *_group_rooms(proc, cgroups)])


def _group_rooms(proc: Path, cgroups: Path) -> Iterable[int]:
    """Bytes each control group above this process leaves. Page cache that can be dropped counts as free."""
    memberships = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    for number, controllers, path in memberships:
        if number == "0":
            root, files = cgroups, ("memory.max", "memory.current", "inactive_file ")
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
        else:
            continue
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            room = _group_room(root / group, *files)
            if room is not None:
                yield room


def _group_room(group: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    try:
        limit = (group / limit_file).read_text().strip()
        usage = int((group / usage_file).read_text())
        stat = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit == "max":
        return None
    cache = sum(int(line.split()[1]) for line in stat if line.startswith(cache_key))
    return max(0, int(limit) - usage + cache)


def _memory_name(region: str) -> str:
    return f"rackserve:{region};"
