"""Where the engines of all ranks spend their time, asked for at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from rackserve.base.ids import Rank

PARTS = ("kernel", "plan", "wait")
"""Computing; deciding, and what of a step is beside its kernels; without a step although requests are there."""

Look = Callable[[], Mapping[str, tuple[float, ...]]]
"""Seconds so far by rank, in the order of PARTS."""


class StepParts(Collector):
    """`look` is asked at each scrape; what it leaves out is zero."""

    def __init__(self, ranks: Iterable[Rank]) -> None:
        self._ranks = list(map(str, ranks))
        self.look: Look = dict

    def collect(self) -> Iterator[Metric]:
        """One family, complete from the first scrape."""
        text = "Time of engines, by part: kernel, plan (goes on beside kernels), wait (idle, with requests there)"
        family = CounterMetricFamily("rackserve_step_part_seconds", text, labels=("rank", "part"))
        found = self.look()
        for rank in self._ranks:
            for part, seconds in zip(PARTS, found.get(rank, (0.0,) * len(PARTS)), strict=True):
                family.add_metric((rank, part), seconds)
        yield family
