"""What each rank computes with, asked for at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rackserve.base.ids import Rank

Look = Callable[[], Mapping[str, tuple[str, int]]]
"""Kernels and threads of a device, by rank; those are left out that have not started yet."""


class EngineInfo(Collector):
    """`look` is asked at each scrape; ranks that it leaves out have 0 and empty labels."""

    def __init__(self, ranks: Iterable[Rank]) -> None:
        self._ranks = list(map(str, ranks))
        self.look: Look = dict

    def collect(self) -> Iterator[Metric]:
        """One family, with a series for each rank."""
        text = "1, with what computes (an instruction set, or torch) and on how many threads of a device"
        family = GaugeMetricFamily("rackserve_engine_info", text, labels=("rank", "kernels", "threads"))
        found = self.look()
        for rank in self._ranks:
            kernels, threads = found.get(rank, ("", 0))
            family.add_metric((rank, kernels, str(threads or "")), int(bool(kernels)))
        yield family
