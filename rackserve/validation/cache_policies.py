"""Hit rates of agent sessions by cache size and placement, by the production cache, pool and placement alone: no step times.

Sessions are replayed by the benchmark's rules; each request lasts as long as its recording says and its prompt is in the cache
from the moment it is sent. All arrangements of one cache size see the same requests at the same times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.ids import Attempt, Rank
from rackserve.base.keys import CacheNamespace, count, prefix
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.messages import BlocksRemoved, BlocksStored
from rackserve.base.request import Request
from rackserve.base.units import NS_PER_S, Time, to_ns
from rackserve.bench.closed_loop import Replay
from rackserve.bench.plan import RequestKey
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.session import Session
from rackserve.kv.rank_cache import RankCache
from rackserve.pool.directory import Directory, PoolConfig
from rackserve.route.cost import Candidate, uncached_work
from rackserve.route.index import PrefixIndex
from rackserve.route.load import LoadBook
from rackserve.route.placement import POLICIES, PlacementPolicy
from rackserve.runs.cache import Stored

RANKS = 12
LANE_TOKENS = 150_000
"""Tokens of a live session: capacities are counted in lanes times this."""

BLOCK_TOKENS = 64
WARM_S = 600.0
MEASURED_S = 1_800.0
START_WINDOW = (0.0, 1.0)
TOKENS_PER_S = 150_000.0
"""Uncached tokens a rank computes a second, about what is published of the fastest: how long work counts as booked."""

MAX_RUNS = 10_000_000


class CacheSetup(msgspec.Struct, frozen=True):
    """One column pair of the table: `lanes` live sessions, caches of `share` x lanes x LANE_TOKENS tokens altogether."""

    lanes: int
    share: float
    ranks: int = RANKS
    lane_tokens: int = LANE_TOKENS
    block_tokens: int = BLOCK_TOKENS
    warm_s: float = WARM_S
    measured_s: float = MEASURED_S
    tokens_per_s: float = TOKENS_PER_S
    seed: int = 42

    def __post_init__(self) -> None:
        if self.rank_blocks < 1:
            raise ConfigError(f"share {self.share} of {self.lanes} lanes leaves a rank of {self.ranks} no block; raise it")

    @property
    def rank_blocks(self) -> int:
        """Blocks of one rank's cache; the pool has as many for each rank."""
        return int(self.share * self.lanes * self.lane_tokens / self.ranks) // self.block_tokens


class CacheCell(msgspec.Struct, frozen=True):
    """What one arrangement came to. `imbalance`: uncached tokens of the busiest rank over the mean of all."""

    arrangement: str
    hit_rate: float
    imbalance: float


class CacheRow(msgspec.Struct, frozen=True):
    """All arrangements at one cache size; `num_requests` were measured."""

    lanes: int
    share: float
    num_requests: int
    cells: tuple[CacheCell, ...]


class HashedSession:
    """A session's rank is a hash of its name: sticky, and blind to everything else."""

    def place(self, session: str, candidates: Sequence[Candidate]) -> Candidate:
        digest = blake2b(session.encode(), digest_size=8).digest()
        return candidates[int.from_bytes(digest, "little") % len(candidates)]


class Work:
    """Uncached tokens booked on ranks: each rank computes what it was sent, in order, at `tokens_per_s`."""

    __slots__ = ("_book", "_busy_until", "_running", "_tokens_per_s")

    def __init__(self, tokens_per_s: float) -> None:
        self._book = LoadBook()
        self._busy_until: dict[Rank, float] = {}
        self._running: list[tuple[float, int, Rank, Attempt]] = []
        self._tokens_per_s = tokens_per_s

    def advance(self, now: Time) -> None:
        """Release what is computed by now."""
        while self._running and self._running[0][0] <= now:
            _, _, rank, attempt = heapq.heappop(self._running)
            self._book.release(rank, attempt)

    def booked(self, rank: Rank) -> tuple[int, int]:
        """Tokens and requests booked on `rank`."""
        return self._book.booked(rank)

    def add(self, rank: Rank, attempt: Attempt, tokens: int, now: Time) -> None:
        """Book `tokens` until `rank` will have computed them."""
        self._book.book(rank, attempt, tokens)
        done = max(now, self._busy_until.get(rank, 0.0)) + tokens / self._tokens_per_s * NS_PER_S
        self._busy_until[rank] = done
        heapq.heappush(self._running, (done, len(self._running), rank, attempt))


class Arrangement(Protocol):
    """Caches and who is sent where."""

    def serve(self, request: Request, now: Time) -> tuple[int, int]:
        """(rank, cached tokens) of a request, whose prompt is cached afterwards."""
        ...


class RankCaches:
    """A cache for each rank, and a router that knows what they hold from their events and what it sent them.

    `weigh_work` off: the policy sees no booked work, so the least uncached work is the longest prefix.
    """

    __slots__ = ("_block", "_caches", "_index", "_num_events", "_policy", "_ranks", "_weigh_work", "_work")

    def __init__(self, setup: CacheSetup, policy: PlacementPolicy, *, weigh_work: bool = True) -> None:
        layout = KvLayout(setup.block_tokens, (KvGroup("kv", "full", 1),))
        self._ranks = [Rank("rank", number) for number in range(setup.ranks)]
        self._caches = [RankCache(rank, layout, setup.rank_blocks) for rank in self._ranks]
        self._index = PrefixIndex(max_runs=MAX_RUNS)
        self._work = Work(setup.tokens_per_s)
        self._policy = policy
        self._weigh_work = weigh_work
        self._block = setup.block_tokens
        self._num_events = [0] * setup.ranks

    def serve(self, request: Request, now: Time) -> tuple[int, int]:
        self._work.advance(now)
        held = self._index.match(request.chain)
        candidates = []
        for rank in self._ranks:
            local, _, own = uncached_work(request.num_tokens, held.get(rank, 0) * self._block, 0, 0.0)
            candidates.append(Candidate(rank, local, 0, own, *(self._work.booked(rank) if self._weigh_work else (0, 0))))
        chosen = self._policy.place(request.session, candidates)
        self._work.add(chosen.rank, request.key, chosen.own_tokens, now)
        return chosen.rank.dp_rank, self._take(chosen.rank.dp_rank, request)

    def _take(self, number: int, request: Request) -> int:
        """Cached tokens; the prompt is committed as far as the cache is large."""
        cache = self._caches[number]
        chain = prefix(request.chain, cache.num_blocks)
        matched = cache.match(chain, (request.num_tokens - 1) // self._block)
        lease = cache.acquire(chain, matched, count(chain) - matched)
        if lease is None:
            raise InvariantError(f"a prompt of {request.num_tokens} tokens finds no room on an idle rank")
        cache.commit(lease, chain, count(chain))
        cache.release(lease)
        for event in cache.take_events():
            self._num_events[number] += 1
            if isinstance(event, Stored):
                self._index.apply(BlocksStored(cache.rank, self._num_events[number], event.chain, event.start))
            else:
                self._index.apply(BlocksRemoved(cache.rank, self._num_events[number], event.chain, event.keep))
        return matched * self._block


class OnePool:
    """All ranks' room as one pool; where a prompt is computed does not matter to it."""

    __slots__ = ("_block", "_policy", "_pool", "_ranks", "_room", "_work")

    def __init__(self, setup: CacheSetup, policy: PlacementPolicy) -> None:
        self._ranks = [Rank("rank", number) for number in range(setup.ranks)]
        self._pool = Directory(PoolConfig(), needs_window=False)
        for number, rank in enumerate(self._ranks):
            self._pool.blocks.join(number, setup.rank_blocks, rank)
        self._room = setup.rank_blocks * setup.ranks
        self._work = Work(setup.tokens_per_s)
        self._policy = policy
        self._block = setup.block_tokens

    def serve(self, request: Request, now: Time) -> tuple[int, int]:
        self._work.advance(now)
        cached = self._take(request, now)
        own = request.num_tokens - cached
        candidates = [Candidate(rank, 0, cached, own, *self._work.booked(rank)) for rank in self._ranks]
        rank = self._policy.place(request.session, candidates).rank
        self._work.add(rank, request.key, own, now)
        return rank.dp_rank, cached

    def _take(self, request: Request, now: Time) -> int:
        """Cached tokens: what a look-up leases. For the rest room is granted, and committed."""
        chain, pool = prefix(request.chain, self._room), self._pool
        found = pool.lookup(request.key, self._ranks[0], prefix(chain, (request.num_tokens - 1) // self._block), 0, now)
        if found.lease:
            pool.release(found.lease)
        granted = pool.store(request.key, self._ranks[0], chain, 0, False, now)
        if granted.grant:
            pool.commit(granted.grant)
        pool.take_events()
        return len(found.slots) * self._block


ARRANGEMENTS: dict[str, Callable[[CacheSetup], Arrangement]] = {
    "pool": lambda setup: OnePool(setup, POLICIES["least_uncached_work"]()),
    "least uncached work": lambda setup: RankCaches(setup, POLICIES["least_uncached_work"]()),
    "most cached": lambda setup: RankCaches(setup, POLICIES["least_uncached_work"](), weigh_work=False),
    "session affinity": lambda setup: RankCaches(setup, POLICIES["session_affinity"]()),
    "sticky hash": lambda setup: RankCaches(setup, HashedSession()),
    "round robin": lambda setup: RankCaches(setup, POLICIES["round_robin"]()),
}
"""What is compared, by name: one pool, and caches of the ranks under the production policies and a hash of the session."""


def requests_of_lanes(sessions: Sequence[Session], setup: CacheSetup) -> Iterator[tuple[Time, Request, bool]]:
    """(time, request, whether it is measured) as each is sent; answers last as long as in the recording."""
    plan = Replay(sessions, setup.lanes, recycle=True, start_window=START_WINDOW, seed=setup.seed)
    namespace = CacheNamespace("trace", "0", setup.block_tokens, "ids")
    maker = RequestMaker(namespace, seed=setup.seed, with_tokens=False)
    flying: list[tuple[Time, int, RequestKey]] = []
    now = num_sent = 0
    plan.start(now)
    while not plan.done:
        begin = plan.measured_from_ns
        if begin is not None and now >= begin + to_ns(setup.warm_s + setup.measured_s):
            return
        for send in plan.take_due(now):
            yield now, maker.make(send), begin is not None and now >= begin + to_ns(setup.warm_s)
            num_sent += 1
            heapq.heappush(flying, (now + max(1, send.request.api_ns), num_sent, send.key))
        due = plan.next_due
        if flying and (due is None or flying[0][0] <= due):
            now, _, key = heapq.heappop(flying)
            plan.on_finished(key, now)
        elif due is not None:
            now = due


def compare_caches(
    sessions: Sequence[Session], setup: CacheSetup, arrangements: Sequence[str] = tuple(ARRANGEMENTS)
) -> CacheRow:
    """Hit rates of `arrangements` at one cache size. ConfigError if no request is measured, or blocks do not fit `setup`'s."""
    made = [ARRANGEMENTS[name](setup) for name in arrangements]
    hits = [0] * len(made)
    work = [[0] * setup.ranks for _ in made]
    total = num_requests = 0
    for now, request, measured in requests_of_lanes(sessions, setup):
        num_requests += measured
        total += measured * request.num_tokens
        for number, arrangement in enumerate(made):
            rank, cached = arrangement.serve(request, now)
            if measured:
                hits[number] += cached
                work[number][rank] += request.num_tokens - cached
    if not total:
        raise ConfigError("no request was measured; give more or longer sessions, or measure for longer")
    cells = (
        CacheCell(name, hit / total, max(each) * setup.ranks / sum(each))
        for name, hit, each in zip(arrangements, hits, work, strict=True)
    )
    return CacheRow(setup.lanes, setup.share, num_requests, tuple(cells))
