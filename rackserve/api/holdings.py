"""What the rack holds, asked for at each scrape: KV blocks of ranks and pool, what the pool has done, messages lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rackserve.base.ids import POOL_RANK, Rank

KV_STATES = ("used", "cached", "total")

POOL_COUNTS = {
    "hits": ("pool_hit_blocks", "Blocks that lookups found in the pool"),
    "misses": ("pool_missed_blocks", "Blocks that lookups did not find in the pool"),
    "stored": ("pool_stored_blocks", "Blocks written to the pool"),
    "evicted": ("pool_evicted_blocks", "Blocks that the pool gave up for others"),
    "lost": ("pool_lost_blocks", "Blocks that went with the memory of a tray"),
    "refused_full": ("pool_refused_blocks", "Blocks that the pool had no room for"),
    "expired_leases": ("pool_expired_leases", "Readers' leases that ended by their time limit"),
    "expired_grants": ("pool_expired_grants", "Writers' grants that ended by their time limit"),
}
"""What the pool's directory counts -> metric and meaning."""


class Holding(msgspec.Struct, frozen=True):
    """KV blocks of one holder: held or read by running requests; in its cache, read or not; all it has."""

    used: int = 0
    cached: int = 0
    total: int = 0


Look = Callable[[], tuple[Mapping[str, Holding], Mapping[str, int]]]
"""Holders by name, and what the pool's directory counts."""


class Holdings(Collector):
    """`look` is asked at each scrape; what it leaves out is zero."""

    def __init__(self, ranks: Iterable[Rank]) -> None:
        self._holders = [*map(str, ranks), str(POOL_RANK)]
        self.look: Look = lambda: ({}, {})

    def collect(self) -> Iterator[Metric]:
        """The families, complete from the first scrape."""
        holders, counts = self.look()
        blocks = GaugeMetricFamily("rackserve_kv_blocks", "KV blocks of a holder, by state", labels=("holder", "state"))
        usage = GaugeMetricFamily("rackserve_kv_usage_ratio", "Used KV blocks of a holder as a part of all", labels=("holder",))
        for name in self._holders:
            holding = holders.get(name, Holding())
            for state in KV_STATES:
                blocks.add_metric((name, state), getattr(holding, state))
            usage.add_metric((name,), holding.used / holding.total if holding.total else 0.0)
        yield blocks
        yield usage
        for count, (name, text) in POOL_COUNTS.items():
            yield CounterMetricFamily(f"rackserve_{name}", text, value=counts.get(count, 0))
