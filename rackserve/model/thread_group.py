"""A tensor-parallel rank inside one process, a thread per device: slow, and to the bit what device processes compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
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


class _Meeting:
    """Where the threads leave what they have for each other."""

    __slots__ = ("_barrier", "_values")

    def __init__(self, num_devices: int) -> None:
        self._barrier = threading.Barrier(num_devices)
        self._values: list[Any] = [None] * num_devices

    def share(self, device: int, value: Any) -> list[Any]:
        """The values of all devices in order, once all have called. ResourceError if one never will."""
        try:
            self._values[device] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()  # nobody writes again before all have read
        except threading.BrokenBarrierError:
            raise ResourceError("another device of the rank has failed") from None
        return values

    def give_up(self) -> None:
        self._barrier.abort()


class _Member(Alone):
    """The collectives of one thread. Experts are not spread, so there is nothing to exchange."""

    def __init__(self, meeting: _Meeting, share: Share) -> None:
        self._meeting = meeting
        self.share = share

    def tp_sum(self, part: Tensor) -> Tensor:
        first, *others = self._meeting.share(self.share.tp_rank, part)
        total: Tensor = first.clone()
        for other in others:
            total += other
        return total

    def tp_concat(self, part: Tensor) -> Tensor:
        return torch.cat(self._meeting.share(self.share.tp_rank, part), dim=-1)

    def any(self, flag: bool) -> bool:
        return any(self._meeting.share(self.share.tp_rank, flag))

    def agree(self, values: list[float]) -> list[float]:
        first: list[float] = self._meeting.share(self.share.tp_rank, values)[0]
        return first


class ThreadGroup(Generic[DeviceT]):
    """Computes steps as `num_devices` devices do that split one rank. `layout` is that of every device."""

    def __init__(self, num_devices: int, open_device: Callable[[Collectives], DeviceT]) -> None:
        """`open_device` opens the part of the device whose collectives it is given."""
        self._meeting = _Meeting(num_devices)
        members = [_Member(self._meeting, Share(number, num_devices)) for number in range(num_devices)]
        self._pool = ThreadPoolExecutor(num_devices, thread_name_prefix="device")
        self.devices = [open_device(member) for member in members]
        self.layout = self.devices[0].layout

    def run(self, step: Step) -> StepResult:
        """The result of the first device. Raises what a device raised; the group is of no use then."""
        results = [self._pool.submit(self._run_one, device, step) for device in self.devices]
        wait(results)
        errors = [error for error in (result.exception() for result in results) if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, ResourceError)), errors[0])
        return results[0].result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _run_one(self, device: DeviceT, step: Step) -> StepResult:
        try:
            return device.run(step)
        except BaseException:
            self._meeting.give_up()
            raise
