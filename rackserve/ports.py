"""The only ways out of a node. None of them blocks, and nothing comes back but messages to `Node.handle`.

Each port has two real implementations, one per host: `sim` and `live`.
"""

from __future__ import annotations

from typing import Protocol

from rackserve.base.events import Event
from rackserve.base.ids import NodeId
from rackserve.base.messages import Message
from rackserve.base.step import GroupStep
from rackserve.base.transfer import Transfer
from rackserve.base.units import Time


class Clock(Protocol):
    """The host's time. A message asked for with `call_at` comes to the asking node, never before `when`."""

    def now(self) -> Time: ...

    def call_at(self, when: Time, message: Message) -> None: ...


class Transport(Protocol):
    """Messages to other nodes: first in first out per pair, at most once, bounded (an overflow is a counted loss)."""

    def send(self, to: NodeId, message: Message) -> None: ...


class Engine(Protocol):
    """The compute of one group of ranks. At most two steps are in flight; each ends in `StepFinished` or `EngineFailed`.

    A step planned while the one before it ran builds on that one: if the first fails, what the second yields for the same
    sequences is worth nothing, however it ends.
    """

    def start(self, step: GroupStep) -> None: ...

    def interrupt(self) -> None:
        """End the running step between two of its forward passes; one of a single pass is let be."""
        ...


class BlockStore(Protocol):
    """Moves KV slots. Each transfer ends in exactly one `TransferFinished` or `TransferFailed`; a cancelled one too."""

    def start(self, transfer: Transfer) -> None: ...

    def cancel(self, number: int) -> None: ...


class Recorder(Protocol):
    """Metrics, logs and golden traces in one place."""

    def record(self, event: Event) -> None: ...


class Node(Protocol):
    """One process role. `handle` runs to completion and is never entered twice at once."""

    def handle(self, message: Message) -> None: ...
