"""A tensor-parallel rank inside one process, a thread per device: slow, and to the bit what device processes compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rackserve.base.errors import ResourceError
from rackserve.base.kv_layout import KvLayout
from rackserve.base.step import Step, StepResult
from rackserve.model.parallel import Alone, Collectives, Share


class Device(Protocol):
    """One device's part of the model."""

    layout: KvLayout

    def run(self, step: Step) -> StepResult: ...


DeviceT = TypeVar("DeviceT", bound=Device)
ResultT = TypeVar("ResultT")


LIMIT_S = 300.0
"""How long a device waits for the others; opening the model and the slowest step are shorter."""


class _Meeting:
    """Where the threads leave what they have for each other."""

    __slots__ = ("_barrier", "_values")

    def __init__(self, num_devices: int) -> None:
        self._barrier = threading.Barrier(num_devices, timeout=LIMIT_S)
        self._values: list[Any] = [None] * num_devices

    def swap(self, device: int, value: Any) -> list[Any]:
        """The values of all devices in order, once all have called. ResourceError if one never will, or is LIMIT_S late."""
        try:
            self._values[device] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()  # nobody writes again before all have read
        except threading.BrokenBarrierError:
            raise ResourceError("another device of the rank has failed or is late") from None
        return values

    def give_up(self) -> None:
        self._barrier.abort()


class _Member(Alone):
    """The collectives of one thread. Experts are not spread, so there is nothing to exchange."""

    limit_s = LIMIT_S

    def __init__(self, meeting: _Meeting, share: Share) -> None:
        self._meeting = meeting
        self.share = share

    def tp_sum(self, part: Tensor) -> Tensor:
        first, *others = self._meeting.swap(self.share.tp_rank, part)
        total: Tensor = first.clone()
        for other in others:
            total += other
        return total

    def tp_concat(self, part: Tensor) -> Tensor:
        return torch.cat(self._meeting.swap(self.share.tp_rank, part), dim=-1)

    def any(self, flag: bool) -> bool:
        return any(self._meeting.swap(self.share.tp_rank, flag))

    def agree(self, values: list[float]) -> list[float]:
        first: list[float] = self._meeting.swap(self.share.tp_rank, values)[0]
        return first


class ThreadGroup(Generic[DeviceT]):
    """Computes steps as `num_devices` devices do that split one rank. `layout` is that of every device."""

    def __init__(self, num_devices: int, open_device: Callable[[Collectives], DeviceT]) -> None:
        """`open_device` opens the part of the device whose collectives it is given."""
        self._meeting = _Meeting(num_devices)
        members = [_Member(self._meeting, Share(number, num_devices)) for number in range(num_devices)]
        self._pool = ThreadPoolExecutor(num_devices, thread_name_prefix="device")
        self.devices = self._together([partial(open_device, member) for member in members])  # they may meet already
        self.layout = self.devices[0].layout

    def run(self, step: Step) -> StepResult:
        """The result of the first device. Raises what a device raised; the group is of no use then."""
        return self._together([partial(device.run, step) for device in self.devices])[0]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _together(self, tasks: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
        """The results of a task for each device. If one raises, the others give up, and its error is raised."""
        results = [self._pool.submit(self._do, task) for task in tasks]
        wait(results)
        errors = [error for error in (result.exception() for result in results) if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, ResourceError)), errors[0])
        return [result.result() for result in results]

    def _do(self, task: Callable[[], ResultT]) -> ResultT:
        try:
            return task()
        except BaseException:
            self._meeting.give_up()
            raise
