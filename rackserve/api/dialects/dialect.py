"""What every dialect provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from rackserve.api.answer import Delta
from rackserve.api.ask import Ask
from rackserve.api.call import Call
from rackserve.base.errors import RequestError


class Event(msgspec.Struct, frozen=True):
    """One server-sent event. `name` is its `event:` line, none if empty."""

    data: bytes
    name: str = ""


class Reply(Protocol):
    """Writes the answer to one call: either all of `events` in order, then `closing`; or `body`."""

    def events(self, delta: Delta) -> list[Event]:
        """What the stream shows of the next delta."""
        ...

    def closing(self) -> list[Event]:
        """The end of the stream, once every choice has ended."""
        ...

    def body(self, deltas: Sequence[Delta]) -> bytes:
        """The plain answer to the whole of a call."""
        ...

    def failure(self, error: RequestError) -> list[Event]:
        """The end of a stream that cannot go on."""
        ...


class Dialect(Protocol):
    """One way to ask. Stateless."""

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Ask:
        """What the body in `raw` asks for. Raises RequestError naming the field at fault. Headers by lower-case name."""
        ...

    def reply(self, call: Call) -> Reply:
        """The writer of the answer to `call`."""
        ...
