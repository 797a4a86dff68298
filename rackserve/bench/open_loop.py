"""The open-loop plan: every request is due at a fixed time, whatever became of those before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import log
from typing import Literal

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.rng import Stream
from rackserve.base.units import NS_PER_S, Time
from rackserve.bench.plan import RequestKey, Send
from rackserve.bench.session import Session
from rackserve.bench.streams import streams_of

Arrival = Literal["poisson", "constant"]


class OpenLoop:
    """Sends each session once: where and when it was recorded, or sessions beginning at `rate` a second, turns as far apart as
    recorded.

    arrival   how sessions follow each other at that rate: with drawn (exponential) or equal distances
    """

    def __init__(
        self, sessions: Sequence[Session], *, rate: float | None = None, arrival: Arrival = "poisson", seed: int = 42
    ) -> None:
        if not sessions:
            raise ConfigError("a replay needs at least one session")
        if len({session.id for session in sessions}) < len(sessions):
            raise ConfigError("two sessions of the trace have the same id; ids must differ, or their requests share caches")
        if rate is not None and rate <= 0:
            raise ConfigError(f"rate must be above 0 sessions a second, got {rate}")
        if arrival not in ("poisson", "constant"):
            raise ConfigError(f"arrival must be poisson or constant, got {arrival!r}")
        begins = _begins(len(sessions), rate, arrival, seed)
        self._sends = sorted(_all_sends(sessions, begins), key=lambda send: send.due_ns)
        self._open = Counter(send.key.tree for send in self._sends)
        self._sent = 0
        self._in_flight: set[RequestKey] = set()
        self._zero: Time = 0
        self._stopped = False
        self.measured_from_ns: Time | None = None
        self.steady_end_ns: Time | None = None
        self.sessions_ended_ns: list[Time] = []
        self.aborted = ""
        self.num_finished = 0
        self.num_failed = 0

    @property
    def done(self) -> bool:
        """Everything was sent and has ended."""
        return not self._in_flight and self._sent == len(self._sends)

    @property
    def next_due(self) -> Time | None:
        """When the next request is due; its predecessors do not matter."""
        return self._zero + self._sends[self._sent].due_ns if self._sent < len(self._sends) else None

    def start(self, now: Time) -> None:
        """Begin the schedule at `now`."""
        self._zero = self.measured_from_ns = now

    def stop(self, now: Time) -> None:
        """Let nothing more become due."""
        del self._sends[self._sent :]
        self._stopped = True
        if self.steady_end_ns is None:
            self.steady_end_ns = now

    def take_due(self, now: Time) -> list[Send]:
        """The requests due by `now`, in order. The steady window ends with the last one's due time."""
        sends: list[Send] = []
        while (due := self.next_due) is not None and due <= now:
            send = self._sends[self._sent]
            self._sent += 1
            self._in_flight.add(send.key)
            sends.append(Send(send.key, due, send.request, send.block_tokens, send.last, False, send.shared))
            if self._sent == len(self._sends):
                self.steady_end_ns = due
        return sends

    def on_finished(self, key: RequestKey, now: Time) -> None:
        """The response to `key` ended well at `now`."""
        self.num_finished += 1
        self._end(key, now)

    def on_failed(self, key: RequestKey, now: Time) -> None:
        """The request `key` failed at `now`."""
        self.num_failed += 1
        self._end(key, now)

    def _end(self, key: RequestKey, now: Time) -> None:
        if key not in self._in_flight:
            raise InvariantError(f"request {key} ended but is not in flight")
        self._in_flight.discard(key)
        self._open[key.tree] -= 1
        if not self._open[key.tree] and not self._stopped:
            self.sessions_ended_ns.append(now)


def _begins(count: int, rate: float | None, arrival: Arrival, seed: int) -> Iterator[Time | None]:
    """When each session begins; None: as recorded."""
    stream, at = Stream("arrivals", seed), 0.0
    for _ in range(count):
        yield None if rate is None else round(at * NS_PER_S)
        if rate is not None:
            at += -log(1 - stream.unit()) / rate if arrival == "poisson" else 1 / rate


def _all_sends(sessions: Sequence[Session], begins: Iterator[Time | None]) -> Iterator[Send]:
    for session, begin in zip(sessions, begins, strict=True):
        streams = streams_of(session)
        moved = session.start_ns if begin is None else begin - min(stream.starts_ns[0] for stream in streams)
        for number, stream in enumerate(streams):
            for turn, start in enumerate(stream.starts_ns):
                key, last = RequestKey(session.id, 0, number, turn), turn + 1 == len(stream.turns)
                yield Send(key, start + moved, stream.turns[turn], session.block_tokens, last, False, session.shared)
