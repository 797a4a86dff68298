"""A fleet of engines that mix prompts and decode: production placement, prefixes pulled from the host memory of others."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import msgspec

from rackserve.pool.planner import FetchRates, plan_fetch
from rackserve.route.cost import Candidate, uncached_work
from rackserve.route.load import LoadBook
from rackserve.route.placement import PlacementPolicy
from rackserve.validation.engine import Ask, BatchTime, Engine, Limits
from rackserve.validation.hit_curve import CappedCache

TIER_BLOCKS = 10**9
"""Copies in an engine's host memory are never given up: it is larger than all that these workloads store."""


class Served(msgspec.Struct, frozen=True):
    """One request in seconds on the fleet's clock, and how many prompt tokens were not computed."""

    ask: Ask
    engine: int
    arrived_s: float
    first_s: float
    last_s: float
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s


Follow = Callable[[Served], Iterable[tuple[float, Ask]]]
"""What the end of a request gives rise to: (seconds of arrival, request)."""


class Fleet:
    """`num_engines` engines. The router knows what each holds and has booked; work is booked until the first token.

    pull         rates at which prefixes come from the host memory of another engine; None: they are computed again
    blind        the policy sees no booked work
    """

    __slots__ = ("_book", "_events", "_first", "_limits", "_links", "_num_events", "_policy", "_pull", "_started", "_tiers",
                 "blind", "engines", "now")  # fmt: skip

    def __init__(
        self,
        num_engines: int,
        limits: Limits,
        time: BatchTime,
        policy: PlacementPolicy,
        *,
        pull: FetchRates | None = None,
        blind: bool = False,
    ) -> None:
        self.engines = [Engine(f"engine{number:03}", limits, time) for number in range(num_engines)]
        self.blind = blind
        self.now = 0.0
        self._limits = limits
        self._policy = policy
        self._pull = pull
        self._tiers = [CappedCache(TIER_BLOCKS) for _ in self.engines] if pull else []
        self._links = [0.0] * num_engines
        self._book = LoadBook()
        self._events: list[tuple[float, int, str, int, Ask | None, int]] = []
        self._num_events = 0
        self._started: dict[int, tuple[Ask, int, float]] = {}
        self._first: dict[int, float] = {}

    def run(self, arrivals: Iterable[tuple[float, Ask]], follow: Follow | None = None, until_s: float = 1e12) -> list[Served]:
        """Serve `arrivals` and what follows on them; requests that ended by `until_s`, in the order in which they did."""
        for at, first in arrivals:
            self._push(at, "arrive", -1, first)
        served: list[Served] = []
        while self._events and self._events[0][0] <= until_s:
            self.now, _, kind, number, ask, brought = heapq.heappop(self._events)
            if kind == "arrive" and ask is not None:
                self._place(ask)
            elif kind == "brought" and ask is not None:
                self.engines[number].add(ask, brought)
                self._start(number)
            else:
                for done in self._end(number):
                    served.append(done)
                    for at, after in follow(done) if follow else ():
                        self._push(at, "arrive", -1, after)
        return served

    def _push(self, at: float, kind: str, number: int, ask: Ask | None = None, brought: int = 0) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, kind, number, ask, brought))

    def _place(self, ask: Ask) -> None:
        held = [engine.held(ask) for engine in self.engines]
        block, most = self._limits.block_tokens, (ask.prompt_tokens - 1) // self._limits.block_tokens
        stored = max((min(tier.present(ask.chain), most) * block for tier in self._tiers), default=0)
        cost = self._fetch_cost()
        candidates = []
        for number, local in enumerate(held):
            mine, fetched, own = uncached_work(ask.prompt_tokens, local, stored, cost)
            rank = self.engines[number].name
            candidates.append(Candidate(rank, mine, fetched, own, *((0, 0) if self.blind else self._book.booked(rank))))
        chosen = self._policy.place(ask.session, candidates)
        number = next(at for at, engine in enumerate(self.engines) if engine.name == chosen.rank)
        self._started[ask.number] = (ask, number, self.now)
        self._book.book(chosen.rank, (str(ask.number), 1), chosen.own_tokens)
        self._bring(ask, number, held[number] // block, stored // block)

    def _fetch_cost(self) -> float:
        """Time to fetch a token over time to compute it."""
        pull = self._pull
        return (
            pull.block_bytes / self._limits.block_tokens / pull.fetch_bytes_per_s * pull.prefill_tokens_per_s if pull else 0.0
        )

    def _bring(self, ask: Ask, number: int, local: int, stored: int) -> None:
        """Queue a request, after its prefix was pulled if that pays. An engine pulls one prefix at a time."""
        blocks = plan_fetch(local, stored, self._limits.block_tokens, self._pull) if self._pull else 0
        if not blocks or self._pull is None:
            self.engines[number].add(ask)
            self._start(number)
            return
        begin = max(self.now, self._links[number])
        self._links[number] = begin + self._pull.fetch_ns(blocks) * 1e-9
        self._push(self._links[number], "brought", number, ask, (local + blocks) * self._limits.block_tokens)

    def _start(self, number: int) -> None:
        engine = self.engines[number]
        if engine.step is None:
            seconds = engine.begin()
            if seconds is not None:
                self._push(self.now + seconds, "pass", number)

    def _end(self, number: int) -> list[Served]:
        engine = self.engines[number]
        firsts, lasts = engine.end()
        for each in firsts:
            self._first[each] = self.now
            self._book.release(engine.name, (str(each), 1))
            if self._tiers:
                self._tiers[number].add(self._started[each][0].chain)
        served = []
        for each in lasts:
            ask, at, arrived = self._started.pop(each)
            served.append(Served(ask, at, arrived, self._first.pop(each), self.now, engine.cached.pop(each)))
        self._start(number)
        return served


def total_hits(served: Sequence[Served]) -> float:
    """Cached share of all prompt tokens."""
    return sum(each.cached_tokens for each in served) / sum(each.ask.prompt_tokens for each in served)
