"""Operating points, the curve they span, and the file that holds it.

A frontier file is JSON: {"rackserve_frontier": 1, "name": ..., "points": [...], "definitions": {...}}. A point needs `label`,
`interactivity` and `per_gpu`, so figures that were published elsewhere can be written down by hand; all else is optional.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from pathlib import Path
from typing import Literal

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.bench.metrics import DEFINITIONS, Summary, Throughput

FORMAT: Literal[1] = 1
Measure = Literal["total", "cached", "uncached", "output"]
MEASURES: dict[Measure, str] = {
    "total": "all three, cached input included",
    "cached": "cached input",
    "uncached": "uncached input",
    "output": "output",
}
"""The throughputs a curve may be drawn or compared by."""


class Band(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a point may lie: (low, high) of both its figures."""

    interactivity: tuple[float, float]
    per_gpu: tuple[float, float]

    def __post_init__(self) -> None:
        for name in ("interactivity", "per_gpu"):
            low, high = getattr(self, name)
            if not 0 <= low <= high < inf:
                raise ValueError(f"`{name}` of a band must be two numbers of at least 0, the lower first, got {low}, {high}")


class OperatingPoint(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a rack gave at one concurrency. Absent figures are None, or 0 for the two counts.

    label           the configuration; empty: the curve has only one
    concurrency     live session trees
    interactivity   tokens/s/user as 1 / p90(time per output token), the slow tail
    per_gpu         tokens/s per GPU, cached input included; `parts` are its three parts, None where only the sum is known
    num_gpus        all GPUs behind the point, prefill and decode
    requests_per_s  completed requests of the whole rack; `requests_per_session`: how many make a session, on average
    valid           False: the run broke a limit and is on no frontier
    utilisation     share of time in which prefill ranks computed; `saturation` says what that makes of the waiting times:
                    STABLE, SATURATED or OVERLOADED, as `bench.statistics.saturation`; empty: unknown
    seeds, coefficients   where the point lies under other draws, and if the cost model's coefficients are off
    num_seeds       runs under seeds of their own that the point is the mean of; 0: unknown, or measured
    trust           how far to believe the point, such as a simulated one's step-time error; empty for a measured one
    """

    label: str
    concurrency: int
    interactivity: float
    per_gpu: float
    parts: Throughput | None = None
    num_gpus: int = 0
    ttft_p50_ms: float | None = None
    ttft_p90_ms: float | None = None
    hit_rate: float | None = None
    requests_per_s: float | None = None
    requests_per_session: float | None = None
    valid: bool = True
    trust: str = ""
    utilisation: float | None = None
    saturation: str = ""
    seeds: Band | None = None
    coefficients: Band | None = None
    num_seeds: int = 0

    def __post_init__(self) -> None:
        for name in ("interactivity", "per_gpu"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"`{name}` must be a number of at least 0, got {value}")
        total = self.per_gpu if self.parts is None else self.parts.total_with_cached_input
        if abs(total - self.per_gpu) > 1e-3 * self.per_gpu:
            raise ValueError(f"`per_gpu` is {self.per_gpu:g} but its `parts` add up to {total:g}")

    def throughput(self, measure: Measure) -> float | None:
        """Tokens/s per GPU by one of `MEASURES`; None where the parts are unknown."""
        if measure == "total":
            return self.per_gpu
        if self.parts is None:
            return None
        return {"cached": self.parts.cached_input, "uncached": self.parts.uncached_input, "output": self.parts.output}[measure]

    @property
    def claims_ttft(self) -> bool:
        """Whether its waiting times say something of the rack: at a saturated one they grow with the run's length."""
        return self.saturation in ("", "STABLE")

    @property
    def requests_per_gpu(self) -> float | None:
        """Completed requests per second and GPU."""
        return self.requests_per_s / self.num_gpus if self.requests_per_s is not None and self.num_gpus else None


class Curve(msgspec.Struct, frozen=True):
    """The operating points of one rack, of any number of configurations."""

    name: str
    points: tuple[OperatingPoint, ...]

    @property
    def trust(self) -> str:
        """How far to believe its points, all that any of them says; empty if all were measured."""
        return ", ".join(dict.fromkeys(point.trust for point in self.points if point.trust))


class _FrontierFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rackserve_frontier: Literal[1]
    name: str
    points: tuple[OperatingPoint, ...]
    definitions: dict[str, str] = {}


class _Probe(msgspec.Struct):
    rackserve_frontier: object = None


def operating_point(summary: Summary, requests_per_session: float | None = None) -> OperatingPoint | None:
    """The point of one run; None if no answer gave a time per token."""
    if summary.interactivity_p90 is None:
        return None
    run, ttft, part = summary.run, summary.ttft_ms, summary.throughput_per_gpu
    error = "not calibrated" if run.step_error is None else f"step-time error {run.step_error:.1%}"
    return OperatingPoint(
        "" if run.label == f"c{run.concurrency}" else run.label,  # a sweep names its runs by concurrency alone
        run.concurrency,
        summary.interactivity_p90,
        part.total_with_cached_input,
        parts=part,
        num_gpus=run.num_gpus,
        ttft_p50_ms=ttft.p50 if ttft else None,
        ttft_p90_ms=ttft.p90 if ttft else None,
        hit_rate=summary.hit_rate,
        requests_per_s=summary.requests_per_s,
        requests_per_session=requests_per_session or summary.requests_per_session,
        valid=summary.valid,
        trust="" if run.host == "live" else error,
    )


def frontier(points: Iterable[OperatingPoint], measure: Measure = "total") -> tuple[OperatingPoint, ...]:
    """The valid points no other beats in both interactivity and throughput per GPU, by rising interactivity.

    Points at which either figure is 0 or unknown are on no frontier.
    """
    known = [(point.throughput(measure) or 0.0, point) for point in points if point.valid and point.interactivity]
    best: list[tuple[float, OperatingPoint]] = []
    for value, point in sorted(known, key=lambda pair: (-pair[1].interactivity, -pair[0])):
        if value > (best[-1][0] if best else 0.0):
            best.append((value, point))
    return tuple(point for _, point in reversed(best))


def write_frontier(path: Path | str, curve: Curve) -> None:
    """Write a frontier file; the rules behind its figures go with it."""
    document = _FrontierFile(FORMAT, curve.name, curve.points, DEFINITIONS)
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written ({error.strerror}); choose another file") from error


def read_curve(path: Path | str) -> Curve:
    """The curve in a frontier file, in the summary of one run, or in a folder of either (a frontier file goes first).

    Raises FileFormatError for a file that is none, and for a folder in which live and simulated runs lie together.
    """
    path = Path(path)
    if not path.is_dir():
        return _read_file(path)
    files = sorted(path.glob("*frontier.json"))
    if len(files) > 1:
        raise FileFormatError(f"{path}: holds {len(files)} frontier files; name one of them, such as {files[0].name}")
    if files:
        return _read_file(files[0])
    curves = [_read_file(file) for file in sorted(path.glob("*.summary.json"))]
    if not curves:
        raise FileFormatError(f"{path}: holds no frontier or summary of a run; give what a bench or simulate wrote with --out")
    points = tuple(point for curve in curves for point in curve.points)
    if len({bool(point.trust) for point in points}) > 1:
        raise FileFormatError(f"{path}: holds live and simulated runs, which are no one curve; name a summary file in it")
    return Curve(path.resolve().name, points)


def _read_file(path: Path) -> Curve:
    try:
        raw = path.read_bytes()
        if msgspec.json.decode(raw, type=_Probe).rackserve_frontier is not None:
            document = msgspec.json.decode(raw, type=_FrontierFile)
            if not document.points:
                raise FileFormatError(f"{path}: `points` is empty; a curve needs at least one")
            return Curve(document.name, document.points)
        summary = msgspec.json.decode(raw, type=Summary)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}); give a frontier file or a run's summary") from None
    except msgspec.MsgspecError as error:
        raise FileFormatError(f"{path}: {error}; give a frontier file or the summary of a run") from None
    point = operating_point(summary)
    if point is None:
        raise FileFormatError(f"{path}: no answer of this run gave a time per token, so it is no point of a curve")
    return Curve(f"{summary.run.host} {summary.run.label}", (point,))
