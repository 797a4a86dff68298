"""From runs to operating points: means over seeds with intervals, labels, and set-ups against each other seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from rackserve.bench.frontier import Band, Curve, OperatingPoint
from rackserve.bench.metrics import Throughput, percentile
from rackserve.bench.statistics import Interval, Paired, Saturation, Statistic, bootstrap, paired, saturation
from rackserve.simulated_rack import FACTORS, SimulatedFigures, SimulatedSetup
from rackserve.whatif.grid import Variant
from rackserve.whatif.runs import ResultRow, SessionSample, seeds_of

DRAWS = 100
TRUST = "step times from the cost model, not calibrated"
Figure = Literal["per_gpu", "requests_per_s", "hit_rate", "interactivity", "ttft_p50_s", "ttft_p90_s"]
FIGURES: dict[Figure, str] = {
    "per_gpu": "tokens/s per GPU",
    "requests_per_s": "requests/s",
    "hit_rate": "hit rate",
    "interactivity": "tokens/s/user",
    "ttft_p50_s": "TTFT p50 (s)",
    "ttft_p90_s": "TTFT p90 (s)",
}


class PointResult(msgspec.Struct, frozen=True):
    """One set-up over all its seeds.

    figures        means of the seeds' figures, by name
    intervals      of those figures: seeds drawn, then sessions in each
    utilisation    share of time in which prefill groups computed; `saturation` of the most saturated seed
    num_sessions   session trees that drained in the windows of all seeds, `num_requests` requests that ended
    errors         why seeds have no result
    coefficients   where the point lies if coefficients are off; None: not asked
    """

    variant: Variant
    figures: dict[Figure, float]
    intervals: dict[Figure, Interval]
    parts: Throughput
    utilisation: float
    saturation: Saturation
    decode_batch: float
    idle_share: float
    num_requests: int
    num_sessions: int
    num_seeds: int
    errors: tuple[str, ...] = ()
    coefficients: Band | None = None

    @property
    def point(self) -> OperatingPoint | None:
        """As a point of a curve; None if it has no speed."""
        figures = self.figures
        if self.errors or not figures.get("interactivity"):
            return None
        setup, p50, p90 = self.variant.setup, figures.get("ttft_p50_s"), figures.get("ttft_p90_s")
        speed, rate = self.intervals.get("interactivity"), self.intervals.get("per_gpu")
        return OperatingPoint(
            self.variant.label,
            setup.concurrency,
            figures["interactivity"],
            figures["per_gpu"],
            parts=self.parts,
            num_gpus=setup.num_gpus,
            ttft_p50_ms=None if p50 is None else 1e3 * p50,
            ttft_p90_ms=None if p90 is None else 1e3 * p90,
            hit_rate=figures.get("hit_rate"),
            requests_per_s=figures["requests_per_s"],
            requests_per_session=self.num_requests / self.num_sessions if self.num_sessions else None,
            trust=TRUST,
            utilisation=self.utilisation,
            saturation=self.saturation,
            seeds=Band((speed.low, speed.high), (rate.low, rate.high)) if speed and rate else None,
            coefficients=self.coefficients,
            num_seeds=self.num_seeds,
        )


def statistic_of(name: Figure, setup: SimulatedSetup) -> Statistic[SessionSample]:
    """A figure of the run of `setup` from its sessions."""

    def latency(values: Callable[[SessionSample], Sequence[float]], share: float) -> Statistic[SessionSample]:
        def find(samples: Sequence[SessionSample]) -> float | None:
            ordered = sorted(value for sample in samples for value in values(sample))
            return percentile(ordered, share) if ordered else None

        return find

    def speed(samples: Sequence[SessionSample]) -> float | None:
        slow = latency(lambda sample: sample.tpot_ms, 0.9)(samples)
        return 1_000 / slow if slow else None

    def hits(samples: Sequence[SessionSample]) -> float | None:
        cached, uncached = sum(s.cached for s in samples), sum(s.uncached for s in samples)
        return cached / (cached + uncached) if cached + uncached else None

    gpu_seconds = setup.window_s * setup.num_gpus
    if name == "per_gpu":
        return lambda samples: sum(s.cached + s.uncached + s.output for s in samples) / gpu_seconds
    if name == "requests_per_s":
        return lambda samples: sum(s.num_requests for s in samples) / setup.window_s
    if name == "hit_rate":
        return hits
    if name == "interactivity":
        return speed
    return latency(lambda sample: sample.ttft_s, 0.5 if name == "ttft_p50_s" else 0.9)


def point_of(variant: Variant, rows: Mapping[SimulatedSetup, ResultRow], num_seeds: int, intervals: bool = True) -> PointResult:
    """What the runs of a set-up under its seeds come to; a seed without a result leaves the point without figures."""
    runs = [rows[setup] for setup in seeds_of(variant.setup, num_seeds)]
    errors = tuple(dict.fromkeys(row.error for row in runs if row.error))
    known = [(row, row.figures) for row in runs if row.figures is not None]
    if errors or not known:
        return PointResult(variant, {}, {}, Throughput(0, 0, 0), 0, "STABLE", 0, 0, 0, 0, num_seeds, errors)
    samples = [row.sessions for row in runs]
    figures, ranges = {}, {}
    for name in FIGURES:
        statistic = statistic_of(name, variant.setup)
        values = [statistic(list(run.values())) for run in samples]
        whole = [value for value in values if value is not None]
        if whole and len(whole) == len(values):
            figures[name] = sum(whole) / len(whole)
            if intervals and (found := bootstrap(samples, statistic, DRAWS)) is not None:
                ranges[name] = found
    labels = [saturation(each.prefill_busy, row.waiting) for row, each in known]
    worst = max(labels, key=("STABLE", "SATURATED", "OVERLOADED").index)
    everyone = [sample for run in samples for sample in run.values()]
    rate = 1 / (variant.setup.window_s * variant.setup.num_gpus * num_seeds)
    parts = Throughput(*(sum(getattr(s, kind) for s in everyone) * rate for kind in ("cached", "uncached", "output")))

    def mean(get: Callable[[SimulatedFigures], float]) -> float:
        return sum(get(each) for _, each in known) / len(known)

    return PointResult(
        variant,
        figures,
        ranges,
        parts,
        mean(lambda each: each.prefill_busy),
        worst,
        mean(lambda each: each.decode_batch),
        mean(lambda each: each.idle_share),
        sum(each.num_requests for _, each in known),
        sum(each.num_sessions for _, each in known),
        num_seeds,
    )


def pair_of(
    first: Variant, second: Variant, rows: Mapping[SimulatedSetup, ResultRow], num_seeds: int, name: Figure
) -> Paired | None:
    """A figure of `first` against that of `second`, seed by seed; None where either has none."""
    runs = [[rows[setup] for setup in seeds_of(variant.setup, num_seeds)] for variant in (first, second)]
    if any(row.error for each in runs for row in each):
        return None
    statistics = [statistic_of(name, variant.setup) for variant in (first, second)]
    tagged = [
        [{session: (side, sample) for session, sample in row.sessions.items()} for row in each]
        for side, each in enumerate(runs)
    ]

    def of_side(samples: Sequence[tuple[int, SessionSample]]) -> float | None:
        return statistics[samples[0][0]]([sample for _, sample in samples]) if samples else None

    return paired(tagged[0], tagged[1], of_side, DRAWS)


def title_of(label: str, name: str = "") -> str:
    """What the curve of a configuration is called."""
    return ", ".join(text for text in (name, label) if text) or "simulated"


def curves_of(results: Sequence[PointResult], name: str = "") -> list[Curve]:
    """A curve for each configuration, in the order in which they come."""
    labels = dict.fromkeys(result.variant.label for result in results)
    curves = []
    for label in labels:
        points = [point for result in results if result.variant.label == label and (point := result.point) is not None]
        if points:
            plain = tuple(msgspec.structs.replace(point, label="") for point in points)
            curves.append(Curve(title_of(label, name), plain))
    return curves


def scaled_by(setup: SimulatedSetup, group: str, factor: float) -> SimulatedSetup:
    """The set-up with one group of coefficients times `factor`. ValueError for a group there is not."""
    if group not in FACTORS:
        raise ValueError(f"no group {group!r}; choose one of {', '.join(FACTORS)}")
    return msgspec.structs.replace(setup, **{group: getattr(setup, group) * factor})
