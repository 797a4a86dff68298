"""KV transfers on shared memory: a copier thread per rank process."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from rackserve.base.errors import InvariantError, RackserveError
from rackserve.base.ids import NodeId
from rackserve.base.messages import Message, TransferFailed, TransferFinished
from rackserve.base.transfer import Copy, Region, Transfer
from rackserve.base.units import MIB
from rackserve.live.host import LiveHost
from rackserve.live.regions import MappedRegion, RegionFile, RegionShape, map_region

LARGEST_COPY = MIB
"""Bytes copied at a stretch; then cancelled transfers and lost regions are looked at."""


class _Stopped(Exception):
    """Ends a transfer; the text is the reason."""


@dataclass(slots=True, eq=False)
class _Job:
    transfer: Transfer
    cancelled: threading.Event = field(default_factory=threading.Event)


class SharedStore:
    """BlockStore port of `node`. Each transfer ends in one message, given to the node on the loop.

    Regions are mapped when first used and unmapped when `set_regions` no longer names them: a transfer that touches a region of
    a dead process fails, and nothing is written to it any more.
    """

    __slots__ = ("_files", "_host", "_jobs", "_lock", "_mapped", "_node", "_queue", "_thread")

    def __init__(self, host: LiveHost, node: NodeId) -> None:
        self._host = host
        self._node = node
        self._jobs: dict[int, _Job] = {}
        self._files: dict[Region, RegionFile] = {}
        self._mapped: dict[Region, MappedRegion] = {}
        self._lock = threading.Lock()  # held while bytes move: guards _files and _mapped
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="copier", daemon=True)
        self._thread.start()

    def start(self, transfer: Transfer) -> None:
        if transfer.number in self._jobs:
            raise InvariantError(f"transfer {transfer.number} is under way already")
        job = _Job(transfer)
        self._jobs[transfer.number] = job
        self._queue.put(job)

    def cancel(self, number: int) -> None:
        """Stop a transfer soon; its end comes as a message all the same. Unknown or ended numbers are ignored."""
        job = self._jobs.get(number)
        if job is not None:
            job.cancelled.set()

    def set_regions(self, files: tuple[RegionFile, ...]) -> None:
        """From now on exactly these regions exist. After the return nothing is written to any other."""
        with self._lock:
            self._files = {file.name: file for file in files}
            for name in [name for name in self._mapped if name not in self._files]:
                self._mapped.pop(name).close()

    def close(self) -> None:
        """Cancel everything, wait for the thread and unmap. Ends that were not delivered yet are lost."""
        for job in self._jobs.values():
            job.cancelled.set()
        self._queue.put(None)
        self._thread.join()
        self.set_regions(())

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            number = job.transfer.number
            message: Message = TransferFinished(number)
            try:
                for copy in job.transfer.copies:
                    self._copy(job, copy)
            except _Stopped as stop:
                message = TransferFailed(number, str(stop))
            except Exception as error:
                message = TransferFailed(number, f"{type(error).__name__}: {error}")
            self._host.post_from_thread(partial(self._end, message, number))

    def _end(self, message: Message, number: int) -> None:
        del self._jobs[number]
        self._host.post(self._node, message, bounded=False)

    def _copy(self, job: _Job, copy: Copy) -> None:
        for source_at, target_at, num_bytes in self._plan(copy):
            with self._lock:
                if job.cancelled.is_set():
                    raise _Stopped("cancelled")
                source, target = self._region(copy.source), self._region(copy.target)
                ctypes.memmove(target.address + target_at, source.address + source_at, num_bytes)  # releases the GIL

    def _plan(self, copy: Copy) -> Iterator[tuple[int, int, int]]:
        """(source offset, target offset, bytes) of each stretch. Raises _Stopped unless all of it lies inside the regions."""
        with self._lock:
            source, target = self._region(copy.source).shape, self._region(copy.target).shape
        if len(copy.source_slots) != len(copy.target_slots):
            raise _Stopped(f"{len(copy.source_slots)} source slots but {len(copy.target_slots)} target slots")
        slot_bytes = source.window_bytes if copy.group == "window" else source.block_bytes
        if slot_bytes != (target.window_bytes if copy.group == "window" else target.block_bytes) or not slot_bytes:
            raise _Stopped(f"{copy.source} and {copy.target} differ in the size of a {copy.group} slot")
        for shape, slots, name in ((source, copy.source_slots, copy.source), (target, copy.target_slots, copy.target)):
            limit = shape.num_window_slots if copy.group == "window" else shape.num_slots
            if slots and not (min(slots) >= 0 and max(slots) < limit):
                raise _Stopped(f"a {copy.group} slot lies outside {name}, which has {limit}")
        source_base, target_base = (_base(shape, copy.group) for shape in (source, target))
        return (
            (source_base + first * slot_bytes + done, target_base + to * slot_bytes + done, min(LARGEST_COPY, total - done))
            for first, to, count in _stretches(copy.source_slots, copy.target_slots)
            for total in (count * slot_bytes,)
            for done in range(0, total, LARGEST_COPY)
        )

    def _region(self, name: Region) -> MappedRegion:
        """The mapping of `name`; the lock is held. Raises _Stopped if there is no such region any more."""
        mapped = self._mapped.get(name)
        if mapped is None:
            file = self._files.get(name)
            if file is None:
                raise _Stopped(f"region {name} is gone")
            try:
                mapped = self._mapped[name] = map_region(file)
            except RackserveError as error:
                raise _Stopped(str(error)) from error
        return mapped


def _base(shape: RegionShape, group: str) -> int:
    return shape.num_slots * shape.block_bytes if group == "window" else 0


def _stretches(sources: tuple[int, ...], targets: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(first source slot, first target slot, count): maximal runs that are consecutive on both sides."""
    begin = 0
    for index in range(1, len(sources) + 1):
        joined = index < len(sources) and sources[index] - sources[begin] == targets[index] - targets[begin] == index - begin
        if not joined:
            yield sources[begin], targets[begin], index - begin
            begin = index
