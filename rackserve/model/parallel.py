"""How the devices of a group share a model, and what they must tell each other during a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:  # shares are planned on machines without torch too
    from torch import Tensor

from rackserve.base.errors import ConfigError


class Share(msgspec.Struct, frozen=True):
    """One device's part of a group of tp_size x ep_size devices.

    A rank (data-parallel for attention) is `tp_size` devices that split heads, groups, vocabulary and the inner width of each
    expert. The experts are spread over the `ep_size` ranks of the group: rank r owns [r * E / ep_size, (r+1) * E / ep_size).
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    @property
    def device(self) -> int:
        """Number of this device in its group: ranks one after the other."""
        return self.ep_rank * self.tp_size + self.tp_rank

    @property
    def num_devices(self) -> int:
        return self.tp_size * self.ep_size

    def tp_slice(self, size: int, what: str, unit: int = 1) -> slice:
        """This device's part of a dimension of `size`, in whole `unit`s. ConfigError if it cannot be cut evenly."""
        if size % (self.tp_size * unit):
            raise ConfigError(f"tensor parallel {self.tp_size}: {what} of {size} cannot be cut into equal multiples of {unit}")
        part = size // self.tp_size
        return slice(self.tp_rank * part, (self.tp_rank + 1) * part)

    def experts(self, num_experts: int) -> range:
        """The experts this device holds (its tensor-parallel slice of each). ConfigError if they do not spread evenly."""
        if num_experts % self.ep_size:
            raise ConfigError(f"expert parallel {self.ep_size}: {num_experts} experts cannot be spread evenly")
        part = num_experts // self.ep_size
        return range(self.ep_rank * part, (self.ep_rank + 1) * part)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Rows that other ranks sent here. `route` is for `Collectives.give_back` alone."""

    rows: Tensor
    route: Any


class Collectives(Protocol):
    """What a device says to the others of its group. Every device of the group makes the same calls in the same order.

    Sums are taken in rank order, so that every device gets the same bits. A peer that is gone or silent for longer than the
    group's deadline raises ResourceError; nothing waits for ever.
    """

    share: Share
    limit_s: float
    """How long a wait for others may last, in seconds."""

    def tp_sum(self, part: Tensor) -> Tensor:
        """Sum over the devices of this rank, float32, any shape that is equal on all of them."""

    def tp_concat(self, part: Tensor) -> Tensor:
        """[..., n] of each device of this rank, joined in order along the last dimension."""

    def exchange(self, rows: Tensor, destinations: Tensor) -> Exchanged:
        """Send row i of `rows` [n, w] (float32) to rank destinations[i] (int64 [n]) of the group; any n, 0 included."""

    def give_back(self, exchanged: Exchanged, results: Tensor) -> Tensor:
        """Send results [m, w'] of the received rows home: returns [n, w'] in the order of the rows that were sent."""

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on some device of the group."""

    def agree(self, values: list[float]) -> list[float]:
        """The values of device 0, on every device of the group; `values` has the same length on all."""


class Alone:
    """The collectives of a group of one device."""

    share = Share()
    limit_s = 300.0

    def tp_sum(self, part: Tensor) -> Tensor:
        return part

    def tp_concat(self, part: Tensor) -> Tensor:
        return part

    def exchange(self, rows: Tensor, destinations: Tensor) -> Exchanged:
        return Exchanged(rows, None)

    def give_back(self, exchanged: Exchanged, results: Tensor) -> Tensor:
        return results

    def any(self, flag: bool) -> bool:
        return flag

    def agree(self, values: list[float]) -> list[float]:
        return values
