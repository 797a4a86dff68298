from __future__ import annotations

from prometheus_client import CollectorRegistry

from rackserve.api.engine_info import EngineInfo
from rackserve.base.ids import Rank


def test_each_scrape_tells_with_what_ranks_compute_and_has_a_series_of_those_that_have_not_started() -> None:
    info, registry = EngineInfo([Rank("prefill0"), Rank("decode0", 1)]), CollectorRegistry()
    registry.register(info)

    def value(rank: str, kernels: str, threads: str) -> float | None:
        return registry.get_sample_value("rackserve_engine_info", {"rank": rank, "kernels": kernels, "threads": threads})

    assert value("prefill0.0", "", "") == value("decode0.1", "", "") == 0.0
    info.look = lambda: {"decode0.1": ("avx2", 2)}
    assert value("decode0.1", "avx2", "2") == 1.0 and value("decode0.1", "", "") is None
    assert value("prefill0.0", "", "") == 0.0
