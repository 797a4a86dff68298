"""How long each wait may last. Every wait in the nodes names one of these."""

from __future__ import annotations

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.units import Time, to_ns


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds. Outer waits are longer than the inner ones they cover, so that the inner owner acts first.

    request      a request from arrival to its last token
    unavailable  how long a request waits for a rank to come (back) up before it fails
    retry        pause before a request that found no rank is placed again
    silence      an attempt without any output token, seen from the frontend; then it is placed again
    reorder      output tokens that came before those they follow
    booking      an attempt from placement to its end, seen from the router; a backstop, longer than `request`
    queue        waiting for blocks on a prefill rank
    lookup       an answer of the pool
    transfer     one transfer of KV
    handover     on a prefill rank: from the end of compute to the end of the last push
    receive      on a decode rank: from the reservation to the hand-over
    fence        between two tries to learn that a peer's transfers have ended
    """

    request: float = 3600.0
    unavailable: float = 120.0
    retry: float = 0.2
    silence: float = 900.0
    reorder: float = 1.0
    booking: float = 3700.0
    queue: float = 600.0
    lookup: float = 2.0
    transfer: float = 8.0
    handover: float = 120.0
    receive: float = 700.0
    fence: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"deadlines.{name} must be a positive number of seconds, got {getattr(self, name)}")
        for inner, outer in (("queue", "silence"), ("lookup", "queue"), ("retry", "unavailable"), ("handover", "receive")):
            if getattr(self, inner) > getattr(self, outer):
                raise ConfigError(f"deadlines.{inner} must not exceed deadlines.{outer}")

    def all_ns(self) -> dict[str, Time]:
        """Every deadline in nanoseconds, by name."""
        return {name: self.ns(name) for name in self.__struct_fields__}

    def ns(self, name: str) -> Time:
        """The named deadline in nanoseconds."""
        return to_ns(getattr(self, name))
