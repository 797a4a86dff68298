"""Hit rates of a trace of single requests by cache size, from the production cache and placement, beside a published curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.base.ids import Rank
from rackserve.base.keys import CacheNamespace, Chain, count, extend_chain, prefix
from rackserve.bench.mooncake import BLOCK_TOKENS
from rackserve.bench.session import requests_of
from rackserve.bench.trace import read_sessions
from rackserve.route.cost import Candidate
from rackserve.route.placement import LeastUncachedWork
from rackserve.runs.cache import RunCache

SOURCE = "Mooncake, FAST 2025, figures 9 and 10, conversation trace; maxima read off the plot"
NODE_TOKENS = 3_000_000
NODES = 10
POOL_TOKENS = 50_000_000


class HitRow(msgspec.Struct, frozen=True):
    """One figure of the curve; `ours` comes from replaying the released trace."""

    what: str
    published: float
    ours: float

    @property
    def error(self) -> float:
        return self.ours / self.published - 1


class CappedCache:
    """A prefix cache of `num_blocks` blocks that takes in every prompt."""

    __slots__ = ("_cache", "_num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self._cache = RunCache()
        self._num_blocks = num_blocks

    def present(self, chain: Chain) -> int:
        return self._cache.present(chain)

    def add(self, chain: Chain) -> int:
        """Blocks of `chain` that were held; afterwards it is held as far as the cache is large."""
        hit = self._cache.match(chain)
        total = min(count(chain), self._num_blocks)
        excess = self._cache.num_blocks + total - hit - self._num_blocks
        if excess > 0:
            self._cache.evict(excess)
        held = min(self._cache.present(chain), total)
        self._cache.insert(prefix(chain, total), [0] * (total - held), held)
        return hit


def prompts_of(path: Path) -> list[tuple[Chain, int]]:
    """(chain, tokens) of each request of a Mooncake trace, in its order. FileFormatError for a trace of another kind."""
    root = CacheNamespace("trace", "0", BLOCK_TOKENS, "ids").root()
    prompts = []
    for session in read_sessions(path):
        if not session.shared or session.block_tokens != BLOCK_TOKENS:
            raise FileFormatError(f"{path}: is no Mooncake trace; give JSONL with `hash_ids` of {BLOCK_TOKENS}-token blocks")
        requests = requests_of(session.entries)
        prompts += [(extend_chain(b"", root, request.hash_ids, 1), request.input_tokens) for request in requests]
    if not prompts:
        raise FileFormatError(f"{path}: holds no request; give Mooncake's conversation trace")
    return prompts


def hit_rate(prompts: Sequence[tuple[Chain, int]], num_blocks: int, num_nodes: int = 1) -> float:
    """Cached share of all prompt tokens with so many caches of `num_blocks` blocks each, placed by least uncached work."""
    caches = [CappedCache(num_blocks) for _ in range(num_nodes)]
    policy, hits, total = LeastUncachedWork(), 0, 0
    for chain, tokens in prompts:
        node = 0
        if num_nodes > 1:
            held = [min(cache.present(chain) * BLOCK_TOKENS, tokens) for cache in caches]
            ranks = [Candidate(Rank("node", at), local, 0, tokens - local, 0, 0) for at, local in enumerate(held)]
            node = policy.place("", ranks).rank.dp_rank
        hits += min(caches[node].add(chain) * BLOCK_TOKENS, tokens)
        total += tokens
    return hits / total if total else 0.0


def compare_hits(path: Path) -> list[HitRow]:
    """The published figures of the conversation trace beside ours."""
    prompts = prompts_of(path)
    node = NODE_TOKENS // BLOCK_TOKENS
    most = hit_rate(prompts, 10**8)
    one, pool = hit_rate(prompts, node), hit_rate(prompts, POOL_TOKENS // BLOCK_TOKENS)
    local, shared = hit_rate(prompts, node, NODES), hit_rate(prompts, NODES * node)
    return [
        HitRow("hit rate without limit", 0.40, most),
        HitRow("hit rate of 3 M tokens, share of that without limit", 0.41, one / most if most else 0.0),
        HitRow("hit rate of 50 M tokens, share of that without limit", 1.0, pool / most if most else 0.0),
        HitRow("hit rate of 10 caches of 3 M tokens", 0.17, local),
        HitRow("hit rate of one of 30 M tokens", 0.37, shared),
        HitRow("one of 30 M tokens over 10 of 3 M", 2.22, shared / local if local else 0.0),
    ]
