"""What a replay plan says to its driver and hears from it: requests by key, when they are due, and what has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rackserve.base.units import NS_PER_S, Time
from rackserve.bench.session import TraceRequest


class RequestKey(msgspec.Struct, frozen=True):
    """Turn `turn` of stream `stream` of the `play`-th replay of a session."""

    session: str
    play: int
    stream: int
    turn: int

    def __str__(self) -> str:
        return f"{self.session}/{self.play}/{self.stream}/{self.turn}"

    @property
    def tree(self) -> str:
        """The name of one play of a session: what a server sees as the session."""
        return f"{self.session}/{self.play}"


class Send(msgspec.Struct, frozen=True):
    """Send this request now; it was due at `due_ns`. `last` says that its stream ends with it.

    warmup   it only fills caches (one output token) and is left out of the metrics
    shared   the trace's hash ids mean the same in all sessions of the play
    """

    key: RequestKey
    due_ns: Time
    request: TraceRequest
    block_tokens: int
    last: bool
    warmup: bool = False
    shared: bool = False

    @property
    def scope(self) -> str:
        """Within it equal hash ids mean equal tokens: one play of the session, or of the whole trace."""
        return f"*/{self.key.play}" if self.shared else self.key.tree


class IdleCaps(msgspec.Struct, frozen=True):
    """The longest idle time of a session tree and of the whole system, in real time of the run."""

    tree_ns: Time = 300 * NS_PER_S
    system_ns: Time = 10 * NS_PER_S

    def scaled(self, time_scale: float) -> IdleCaps:
        """The caps for a trace whose times were divided by `time_scale`."""
        return IdleCaps(round(self.tree_ns / time_scale), round(self.system_ns / time_scale))


class Plan(Protocol):
    """What a driver needs. After `start` and after each end it sends what `take_due` gives and comes back at `next_due`."""

    @property
    def done(self) -> bool: ...

    @property
    def next_due(self) -> Time | None: ...

    @property
    def measured_from_ns(self) -> Time | None:
        """When warming up was over; None before."""

    @property
    def steady_end_ns(self) -> Time | None:
        """When the load began to thin out; None while it has not."""

    @property
    def sessions_ended_ns(self) -> Sequence[Time]:
        """When session trees ended, all their requests sent and over; those that ended while warming up are left out."""

    @property
    def aborted(self) -> str:
        """Why the run makes no sense and was stopped by the plan itself; else empty."""

    def start(self, now: Time) -> None: ...

    def take_due(self, now: Time) -> list[Send]: ...

    def on_finished(self, key: RequestKey, now: Time) -> None: ...

    def on_failed(self, key: RequestKey, now: Time) -> None: ...

    def stop(self, now: Time) -> None: ...
