"""Small stand-ins for the tests of bench: sessions, a driver for plans, and an event loop whose time is a number."""

from __future__ import annotations

import asyncio
import heapq
import selectors
from array import array
from collections.abc import Callable, Sequence

from rackserve.base.units import NS_PER_S, to_ns
from rackserve.bench.plan import Plan, RequestKey, Send
from rackserve.bench.session import Session, Subagent, TraceRequest


def ids(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def request(at_s: float, api_s: float = 1.0, blocks: Sequence[int] = (1,), outputs: int = 4) -> TraceRequest:
    return TraceRequest(to_ns(at_s), to_ns(api_s), len(blocks) * 4, outputs, ids(*blocks))


def session(name: str, *entries: TraceRequest | Subagent) -> Session:
    return Session(name, 4, entries)


def drive(
    plan: Plan,
    answer_s: Callable[[Send], float],
    *,
    until_s: float = 1e9,
    fails: Callable[[RequestKey], bool] = lambda key: False,
) -> dict[str, tuple[float, float]]:
    """Run a plan to its end on a toy clock: request -> (sent, ended) in seconds. Each answer takes `answer_s(send)`."""
    now, limit = 0, to_ns(until_s)
    flying: list[tuple[int, int, RequestKey]] = []
    times: dict[str, tuple[float, float]] = {}
    plan.start(now)
    while not plan.done:
        for send in plan.take_due(now):
            assert send.due_ns == now, "a request is taken exactly when it is due"
            end = now + to_ns(answer_s(send))
            heapq.heappush(flying, (end, len(times), send.key))
            times[str(send.key)] = (now / NS_PER_S, end / NS_PER_S)
        due = plan.next_due
        if flying and (due is None or flying[0][0] <= due):
            now, _, key = heapq.heappop(flying)
            (plan.on_failed if fails(key) else plan.on_finished)(key, now)
        elif due is not None:
            assert due > now
            now = due
        if now >= limit:
            plan.stop(now)
    return times


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, moves the loop's time forward."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "the test would wait for ever"
        self.time += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time: `time()` jumps to the next timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.time

    def block(self, seconds: float) -> None:
        """What code does that computes for so long without giving way."""
        self._jumping.time += seconds

    def now_ns(self) -> int:
        return round(self.time() * NS_PER_S)
