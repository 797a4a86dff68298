from __future__ import annotations

from dataclasses import fields

from prometheus_client import CollectorRegistry

from rackserve.api.holdings import POOL_COUNTS, Holding, Holdings
from rackserve.base.ids import Rank
from rackserve.pool.directory import PoolCounters


def test_each_scrape_asks_anew_and_what_is_not_known_is_zero() -> None:
    holdings, registry = Holdings([Rank("prefill0"), Rank("decode0")]), CollectorRegistry()
    registry.register(holdings)
    assert registry.get_sample_value("rackserve_kv_usage_ratio", {"holder": "decode0.0"}) == 0
    holdings.look = lambda: ({"prefill0.0": Holding(3, 5, 12)}, {"hits": 7})
    states = [
        registry.get_sample_value("rackserve_kv_blocks", {"holder": "prefill0.0", "state": state})
        for state in ("used", "cached", "total")
    ]
    assert states == [3, 5, 12]
    assert registry.get_sample_value("rackserve_kv_usage_ratio", {"holder": "prefill0.0"}) == 0.25
    assert registry.get_sample_value("rackserve_kv_blocks", {"holder": "pool.0", "state": "total"}) == 0
    assert registry.get_sample_value("rackserve_pool_hit_blocks_total") == 7
    assert registry.get_sample_value("rackserve_pool_lost_blocks_total") == 0


def test_every_count_of_the_pool_is_a_metric() -> None:
    assert list(POOL_COUNTS) == [field.name for field in fields(PoolCounters)]
