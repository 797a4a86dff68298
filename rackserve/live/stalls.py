"""Tells stuck from busy: a rank that has work and neither ends a step nor computes one is stuck."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackserve.base.events import QueueChanged, RankChanged, RequestArrived, RequestEnded, StepDone
from rackserve.base.ids import Rank
from rackserve.base.units import Time, to_ns, to_seconds
from rackserve.live.rank_spec import BEAT_PERIOD_S, RankStatus
from rackserve.live.recorder import Recorded

ALIVE_S = 4 * BEAT_PERIOD_S
"""A rank that gave a sign of life so lately is taken to be computing the step it said it had begun."""


class Stall(msgspec.Struct, frozen=True):
    """`where` nothing moves: a role, or "placement" if requests are open and no rank has any; for how many seconds."""

    where: str
    seconds: float


class StallWatch:
    """A sink (see recorder) that knows since when each rank has made no progress on the work it has.

    limit_s  how long that may last. The step that a living rank computes is progress however long it takes: the supervisor
             has its own limit for that.
    """

    __slots__ = ("_idle_since", "_limit_ns", "_open", "_waiting")

    def __init__(self, limit_s: float) -> None:
        self._limit_ns = to_ns(limit_s)
        self._waiting: dict[Rank, Time] = {}  # ranks with work -> the last progress
        self._open: set[str] = set()
        self._idle_since: Time = 0  # when the last rank lost its work, or the first request came

    def __call__(self, recorded: Recorded) -> None:
        event, now = recorded.event, recorded.t
        if isinstance(event, StepDone):
            if event.rank in self._waiting and not event.dummy:
                self._waiting[event.rank] = now
        elif isinstance(event, QueueChanged):
            if event.queued or event.running:
                self._waiting.setdefault(event.rank, now)
            else:
                self._forget(event.rank, now)
        elif isinstance(event, RankChanged):
            if event.state != "up":
                self._forget(event.rank, now)
        elif isinstance(event, RequestArrived):
            if not self._open:
                self._idle_since = max(self._idle_since, now)
            self._open.add(event.request)
        elif isinstance(event, RequestEnded):
            self._open.discard(event.request)

    def _forget(self, rank: Rank, now: Time) -> None:
        if self._waiting.pop(rank, None) is not None:
            self._idle_since = max(self._idle_since, now)

    def age_s(self, status: RankStatus, now: Time) -> float:
        """Seconds for which every rank of a worker that has work has made no progress; 0 if one has, or none has work."""
        since = [last for rank, last in self._waiting.items() if rank.worker == status.worker]
        computes = 0 <= status.beat_age < ALIVE_S and status.step_age >= 0
        return 0.0 if computes or not since else max(0.0, to_seconds(now - max(since)))

    def look(self, ranks: Sequence[RankStatus], now: Time) -> Stall | None:
        """Where all that has work is stuck, if anywhere: the longest stall."""
        limit = to_seconds(self._limit_ns)
        working = {rank.worker for rank in self._waiting}
        stalls = []
        for role in sorted({status.role for status in ranks}):
            ages = [self.age_s(status, now) for status in ranks if status.role == role and status.worker in working]
            if ages and min(ages) > limit:
                stalls.append(Stall(role, round(max(ages), 3)))
        if self._open and not working and now - self._idle_since > self._limit_ns:
            stalls.append(Stall("placement", round(to_seconds(now - self._idle_since), 3)))
        return max(stalls, key=lambda stall: stall.seconds, default=None)
