"""The plan with one request in flight over everything, in trace order: what timing cannot change must then agree exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.units import Time
from rackserve.bench.plan import RequestKey, Send
from rackserve.bench.session import Session
from rackserve.bench.streams import streams_of


class SerialReplay:
    """Each session once, in order; the requests of a session by recorded start (ties: parents first), without pauses."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        if not sessions:
            raise ConfigError("a replay needs at least one session")
        self._sends = self._order(sessions)
        self._next: Send | None = None
        self._in_flight: RequestKey | None = None
        self._due: Time = 0
        self._stopped = False
        self.measured_from_ns: Time | None = None
        self.steady_end_ns: Time | None = None
        self.sessions_ended_ns: list[Time] = []
        self.aborted = ""
        self.num_finished = 0
        self.num_failed = 0

    @staticmethod
    def _order(sessions: Sequence[Session]) -> Iterator[Send]:
        for session in sessions:
            streams = streams_of(session)
            turns = sorted((start, n, k) for n, stream in enumerate(streams) for k, start in enumerate(stream.starts_ns))
            for _, number, turn in turns:
                stream = streams[number]
                last = turn + 1 == len(stream.turns)
                key = RequestKey(session.id, 0, number, turn)
                yield Send(key, 0, stream.turns[turn], session.block_tokens, last, False, session.shared)

    @property
    def done(self) -> bool:
        """Nothing is in flight and nothing is left."""
        return self._in_flight is None and self._next is None

    @property
    def next_due(self) -> Time | None:
        """When the next request is due: at once, unless one is in flight."""
        return None if self._in_flight is not None or self._next is None else self._due

    def start(self, now: Time) -> None:
        """Make the first request due."""
        self.measured_from_ns = now
        self._advance(now)

    def stop(self, now: Time) -> None:
        """Let nothing more become due."""
        self._next = None
        self._sends = iter(())
        self._stopped = True

    def take_due(self, now: Time) -> list[Send]:
        """The next request, unless one is in flight."""
        if self._next is None or self._in_flight is not None:
            return []
        send = self._next
        self._in_flight = send.key
        return [msgspec.structs.replace(send, due_ns=self._due)]

    def on_finished(self, key: RequestKey, now: Time) -> None:
        """The response to `key` ended well at `now`."""
        self.num_finished += 1
        self._end(key, now)

    def on_failed(self, key: RequestKey, now: Time) -> None:
        """The request `key` failed at `now`; the next one follows all the same."""
        self.num_failed += 1
        self._end(key, now)

    def _end(self, key: RequestKey, now: Time) -> None:
        if key != self._in_flight:
            raise InvariantError(f"request {key} ended but is not in flight")
        self._in_flight = None
        self._advance(now)
        if not self._stopped and (self._next is None or self._next.key.session != key.session):
            self.sessions_ended_ns.append(now)

    def _advance(self, now: Time) -> None:
        self._next = next(self._sends, None)
        self._due = now
