"""The rack as the page shows it: made from recorded events, one sample every two seconds, ten minutes of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rackserve.base.events import (
    DraftsVerified,
    Event,
    FirstTokenSent,
    PrefillAdmitted,
    QueueChanged,
    RankChanged,
    RequestEnded,
    StepDone,
    TransferDone,
)
from rackserve.base.ids import Rank
from rackserve.base.units import NS_PER_S, Time
from rackserve.bench.metrics import percentile
from rackserve.live.rank_spec import RankStatus
from rackserve.live.recorder import Recorded
from rackserve.pool.directory import Directory

PERIOD_NS: Time = 2 * NS_PER_S
NUM_SAMPLES = 300
WINDOW_NS: Time = 60 * NS_PER_S
MAX_IN_WINDOW = 4000
"""Requests the window holds at most; of a faster rack it holds the latest."""

FLOWS = ("fetch", "push", "spill")


class Sample(msgspec.Struct, frozen=True):
    """What happened in PERIOD_NS that ended `t` seconds after the view began; rates per second.

    output, uncached, cached  tokens: drawn by steps; admitted to prefill ranks, computed there or not
    hit                       cached share of prompt tokens admitted; None if there were none
    ttft, speed               (p50, p90) of the window before `t`: seconds to the first token, and tokens/s/user, p90 being
                              the slow tail; None if the window has none
    point                     (tokens/s/user of the slow tail, tokens/s per rank) by the requests that finished in the window
    """

    t: float
    output: float
    uncached: float
    cached: float
    hit: float | None
    ttft: tuple[float, float] | None
    speed: tuple[float, float] | None
    point: tuple[float, float] | None


class RankView(msgspec.Struct, frozen=True):
    """One rank now. kv: blocks used, cached, all; None before its first sign of life."""

    rank: str
    role: str
    state: str
    running: int
    queued: int
    restarts: int
    kv: tuple[int, int, int] | None


class PoolView(msgspec.Struct, frozen=True):
    """The pool now, in blocks; hits and misses since the start."""

    cached: int
    total: int
    hits: int
    misses: int


class Flow(msgspec.Struct, frozen=True):
    """Finished transfers of one kind in the last closed period, per second."""

    transfers: float
    bytes: float


class Frame(msgspec.Struct, frozen=True):
    """All that the page draws of this moment."""

    ranks: tuple[RankView, ...]
    pool: PoolView | None
    flows: dict[str, Flow]
    sample: Sample | None


@dataclass(slots=True)
class _Period:
    """Sums of the period that is open."""

    output: int = 0
    uncached: int = 0
    cached: int = 0
    transfers: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)


class _Ended(msgspec.Struct, frozen=True):
    t: Time
    tokens: int
    tpot_ns: float


Look = Callable[[], tuple[Sequence[RankStatus], Directory | None]]


class RackView:
    """A sink of recorded events. All times are the monotonic ones of events; `now` may not be before them.

    look  gives the state of ranks and the pool's directory; nothing before the rack exists
    """

    def __init__(self, start: Time) -> None:
        self.look: Look = lambda: ((), None)
        self.samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._start = start
        self._period_end = start + PERIOD_NS
        self._open = _Period()
        self._closed = _Period()
        self._first: deque[tuple[Time, Time]] = deque(maxlen=MAX_IN_WINDOW)
        self._ended: deque[_Ended] = deque(maxlen=MAX_IN_WINDOW)
        self._queues: dict[Rank, tuple[int, int]] = {}
        self._handlers: dict[type[Event], Callable[[Time, Any], None]] = {
            PrefillAdmitted: self._on_admitted,
            StepDone: self._on_step,
            DraftsVerified: self._on_drafts,
            FirstTokenSent: lambda t, event: self._first.append((t, event.ttft_ns)),
            RequestEnded: self._on_ended,
            TransferDone: self._on_transfer,
            QueueChanged: self._on_queue,
            RankChanged: self._on_rank,
        }

    def __call__(self, recorded: Recorded) -> None:
        """Count one event; types that nothing is drawn from are ignored."""
        handler = self._handlers.get(type(recorded.event))
        if handler is not None:
            self._advance(recorded.t)
            handler(recorded.t, recorded.event)

    def frame(self, now: Time) -> Frame:
        """The rack at `now`, which may not be asked from another thread than the control plane's."""
        self._advance(now)
        ranks, pool = self.look()
        flows = {
            kind: Flow(_rate(self._closed.transfers[kind]), _rate(self._closed.bytes[kind])) for kind in FLOWS
        }  # fmt: skip
        return Frame(
            tuple(view for status in ranks for view in self._views(status)),
            None if pool is None else PoolView(pool.num_blocks, pool.blocks.total, pool.counters.hits, pool.counters.misses),
            flows,
            self.samples[-1] if self.samples else None,
        )

    def _views(self, status: RankStatus) -> list[RankView]:
        views = []
        for place in range(max(1, len(status.kv))):
            rank = Rank(status.worker, place)
            queued, running = self._queues.get(rank, (0, 0))
            kv = status.kv[place] if status.kv else None
            told = None if kv is None else (kv.used, kv.cached, kv.total)
            views.append(RankView(str(rank), status.role, status.state, running, queued, status.restarts, told))
        return views

    # ------------------------------------------------------------ events

    def _on_admitted(self, _: Time, event: PrefillAdmitted) -> None:
        cached = event.local_tokens + event.fetched_tokens
        self._open.cached += cached
        self._open.uncached += event.prompt_tokens - cached

    def _on_step(self, _: Time, event: StepDone) -> None:
        self._open.output += event.num_sampled * event.num_passes

    def _on_drafts(self, _: Time, event: DraftsVerified) -> None:
        self._open.output += sum(event.accepted)

    def _on_ended(self, t: Time, event: RequestEnded) -> None:
        if event.outcome == "finished" and event.ttft_ns >= 0:
            gaps = event.output_tokens - 1
            tpot = (event.total_ns - event.ttft_ns) / gaps if gaps > 0 else 0.0
            self._ended.append(_Ended(t, event.prompt_tokens + event.output_tokens, tpot))

    def _on_transfer(self, _: Time, event: TransferDone) -> None:
        if event.outcome == "finished":
            self._open.transfers[event.kind] += 1
            self._open.bytes[event.kind] += event.num_bytes

    def _on_queue(self, _: Time, event: QueueChanged) -> None:
        self._queues[event.rank] = (event.queued, event.running)

    def _on_rank(self, _: Time, event: RankChanged) -> None:
        if event.state != "up":
            self._queues.pop(event.rank, None)

    # ------------------------------------------------------------ time

    def _advance(self, now: Time) -> None:
        """Close the periods that ended before `now`; of a long silence only as many as are kept."""
        missed = (now - self._period_end) // PERIOD_NS - NUM_SAMPLES
        if missed > 0:
            self._period_end += missed * PERIOD_NS
        while now >= self._period_end:
            self._close()

    def _close(self) -> None:
        end, period = self._period_end, self._open
        since = end - WINDOW_NS
        while self._first and self._first[0][0] < since:
            self._first.popleft()
        while self._ended and self._ended[0].t < since:
            self._ended.popleft()
        prompt = period.cached + period.uncached
        speed, point = self._speed(end)
        self.samples.append(
            Sample(
                t=(end - self._start) / NS_PER_S,
                output=_rate(period.output),
                uncached=_rate(period.uncached),
                cached=_rate(period.cached),
                hit=period.cached / prompt if prompt else None,
                ttft=_two([ttft / NS_PER_S for _, ttft in self._first]),
                speed=speed,
                point=point,
            )
        )
        self._closed, self._open = period, _Period()
        self._period_end = end + PERIOD_NS

    def _speed(self, end: Time) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
        slowness = _two([ended.tpot_ns for ended in self._ended if ended.tpot_ns > 0])
        if slowness is None:
            return None, None
        middle, tail = NS_PER_S / slowness[0], NS_PER_S / slowness[1]
        ranks = sum(max(1, len(status.kv)) for status in self.look()[0])
        seconds = min(end - self._start, WINDOW_NS) / NS_PER_S
        tokens = sum(ended.tokens for ended in self._ended)
        return (middle, tail), ((tail, tokens / seconds / ranks) if ranks else None)


def _rate(count: int) -> float:
    return count * NS_PER_S / PERIOD_NS


def _two(values: list[float]) -> tuple[float, float] | None:
    """Median and 90th percentile."""
    if not values:
        return None
    values.sort()
    return percentile(values, 0.5), percentile(values, 0.9)
