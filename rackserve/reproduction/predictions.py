"""What the cost model and the simulator give for each figure. The published table is never read here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Literal

import msgspec

from rackserve.architectures import FLASH, architecture_named
from rackserve.base.topology import Role
from rackserve.bench.frontier import Curve, OperatingPoint
from rackserve.bench.statistics import Interval
from rackserve.report.curves import Line
from rackserve.reproduction.confidence import OF_PAIRS, Load
from rackserve.reproduction.setups import ACCEPTED, LONG_PROMPT, MEDIAN_PROMPT, SPEED
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.cost.load import StepLoad, decode_load
from rackserve.sim.cost.memory import budget
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.hardware import chips
from rackserve.simulated_rack import DRAFTS, MEAN_CONTEXT, SimulatedFigures

GIB = 2**30
STEP_ERROR = 0.05
"""How well decode step times are known: the cost model lies so far from component sums, and bands are drawn so wide."""

Way = Literal["simulated", "cost model", "arithmetic", "not simulated"]


class Prediction(msgspec.Struct, frozen=True):
    """A figure as we get it. `value` is None where nothing was simulated or the operating point does not exist.

    low, high   its least and most with decode steps 5 % longer and shorter, or over seeds and sessions; high None: no bound
    claimed     False for a time at which the rack had no room left: it says how long the run was, more than what the rack does
    elasticity  relative change of the figure over that of the step time
    note        why it is missing, or what it hangs on
    """

    value: float | None
    way: Way
    note: str = ""
    low: float | None = None
    high: float | None = None
    elasticity: float | None = None
    claimed: bool = True


def predict(
    runs: Mapping[str, SimulatedFigures],
    intervals: Mapping[str, Interval] | None = None,
    loads: Mapping[str, Load] | None = None,
) -> dict[str, Prediction]:
    """All predictions by the figure's name, from simulations by the set-up's name. What was not run is said to be so.

    intervals, loads   what `confidence` makes of the same runs
    """
    return _from_cost_model() | _curves(runs) | _pairs(runs, intervals or {}, loads or {})


def _model(chip: str, role: Role, *, tp: int = 1, ep: int = 1, kernels: str = "", table_shards: int = 0) -> StepModel:
    found = chips()[chip]
    coefficients = kernel_sets()[kernels or found.kernels]
    return StepModel(
        Setup(
            architecture=architecture_named(FLASH), chip=found, kernels=coefficients, role=role, tp=tp, ep=ep,
            table_shards=table_shards,
        )
    )  # fmt: skip


def _from_cost_model() -> dict[str, Prediction]:
    single = _model("vr", "decode", tp=8, kernels="rubin-single")

    def speed(model: StepModel, context: int) -> float:
        return ACCEPTED / model.seconds([decode_load(1, context, 1 + DRAFTS)])

    four = {kernels: speed(_model("vr", "decode", tp=4, kernels=kernels), MEAN_CONTEXT) for kernels in ("rubin", "rubin-first")}
    requests = 4.3  # in a step of 32K tokens, at the published miss rate
    prefill = StepLoad(requests, 32_768, 128 * requests, requests * MEAN_CONTEXT, 32_768 * (MEAN_CONTEXT + 4_000))
    decode = decode_load(32, 32 * MEAN_CONTEXT, 1 + DRAFTS)
    model = architecture_named(FLASH)
    lines = budget(_model("vr", "prefill", ep=2, table_shards=18).setup).plan.lines
    shard = next(line for line in lines if line.name == "tables")
    return {
        "single-p50": Prediction(speed(single, MEAN_CONTEXT), "cost model", "fitted to this figure"),
        "single-p90": Prediction(speed(single, LONG_PROMPT), "cost model", "at the P90 prompt; acceptance does not vary"),
        "single-first": Prediction(
            four["rubin"], "cost model", "four chips and today's general kernels are assumed",
            min(four.values()), max(four.values()),
        ),
        "prefill-step": Prediction(
            _against_first(prefill, "prefill", 2), "cost model",
            "only what was named is counted: local weights and residuals, wider instructions, stages in flight",
        ),
        "decode-step": Prediction(
            _against_first(decode, "decode", 32), "cost model",
            "only what was named is counted, at 32 sequences a rank; the profile's batch is not published",
        ),
        "extra-sessions": Prediction(
            model.table_bytes / (model.kv_bytes * MEDIAN_PROMPT), "arithmetic", "at the median prompt"
        ),
        "table-shard": Prediction(shard.num_bytes / GIB, "arithmetic"),
    }  # fmt: skip


def _against_first(load: StepLoad, role: Role, ep: int) -> float:
    """Change of a step's time against Rubin's first build, in percent."""
    now, first = (_model("vr", role, ep=ep, kernels=kernels).seconds([load]) for kernels in ("rubin", "rubin-first"))
    return 100 * (now / first - 1)


# ------------------------------------------------------------ curves


def _curves(runs: Mapping[str, SimulatedFigures]) -> dict[str, Prediction]:
    names = ("rubin-peak", "gb300-peak", "rubin-387", "gb300-387", "peak-ratio", "ratio-387", "rubin-kept")
    rubin, gb300 = (_points(runs, chip) for chip in ("rubin", "gb300"))
    if not rubin or not gb300:
        return dict.fromkeys(names, missing())
    peak, other_peak = (max(total for _, total in curve) for curve in (rubin, gb300))
    matched, other = _at_speed(rubin), _at_speed(_points(runs, "gb300-recipe"))
    return {
        "rubin-peak": Prediction(peak, "simulated", "prefill rate fitted to this figure, in steps that are always full"),
        "gb300-peak": Prediction(other_peak, "simulated"),
        "rubin-387": matched,
        "gb300-387": other,
        "peak-ratio": Prediction(peak / other_peak, "simulated"),
        "ratio-387": _ratio(matched, other),
        "rubin-kept": msgspec.structs.replace(
            matched,
            value=_times(matched.value, 100 / peak),
            low=_times(matched.low, 100 / peak),
            high=_times(matched.high, 100 / peak),
        ),
    }  # fmt: skip


def missing() -> Prediction:
    """A figure whose set-up was not run."""
    return Prediction(None, "not simulated", "its set-up was not run")


def _points(runs: Mapping[str, SimulatedFigures], chip: str) -> list[tuple[float, float]]:
    """(speed, throughput per GPU) of a chip's points that had one, slowest first."""
    found = [(run.interactivity_p90, run.total_per_gpu) for name, run in runs.items() if name.startswith(f"{chip}-")]
    return sorted((speed, total) for speed, total in found if speed is not None)


def throughput_at(points: Sequence[tuple[float, float]], speed: float) -> float | None:
    """Throughput at a speed on the curve of `points` (speed, throughput), by the rule of `rackserve compare`.

    At a speed below the slowest point: the most of all points. None beyond the fastest point.
    """
    if not points:
        return None
    curve = Curve("", tuple(OperatingPoint("", 0, speed, throughput) for speed, throughput in points))
    return Line(curve).at(speed)


def _at_speed(points: Sequence[tuple[float, float]]) -> Prediction:
    """Throughput at the compared speed, with what 5 % more and less step time make of it."""
    middle, low, high = (throughput_at(points, SPEED * (1 + change)) for change in (0.0, STEP_ERROR, -STEP_ERROR))
    if middle is None:
        return _beyond(points, high)
    if low is None:
        note = f"with {STEP_ERROR:.0%} more step time no point of the curve is that fast"
        return Prediction(middle, "simulated", note, 0.0, high)
    slope = None if high is None else (log(low) - log(high)) / (2 * STEP_ERROR)
    return Prediction(middle, "simulated", "", low, high, slope)


def _beyond(points: Sequence[tuple[float, float]], high: float | None) -> Prediction:
    """No point is as fast as the compared speed; `high`: what 5 % less step time would give."""
    fastest = max((speed for speed, _ in points), default=0.0)
    note = f"no point of the curve is that fast, the fastest being at {fastest:.0f}"
    if high is None:
        return Prediction(None, "simulated", note)
    end, reached = throughput_at(points, fastest), SPEED * (1 - STEP_ERROR)
    slope = log(end / high) / log(fastest / reached) if end and fastest > reached else None
    return Prediction(None, "simulated", f"{note}; with {STEP_ERROR:.0%} less step time {high:,.0f}", 0.0, high, slope)


def _ratio(first: Prediction, second: Prediction) -> Prediction:
    value, low, high = (
        _over(*pair) for pair in ((first.value, second.value), (first.low, second.high), (first.high, second.low))
    )
    slope = None
    if first.elasticity is not None and second.elasticity is not None:
        slope = first.elasticity - second.elasticity
    return Prediction(value, "simulated", "" if value is not None else second.note or first.note, low, high, slope)


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


# ------------------------------------------------------------ prefill pairs


def _pairs(
    runs: Mapping[str, SimulatedFigures], intervals: Mapping[str, Interval], loads: Mapping[str, Load]
) -> dict[str, Prediction]:
    found: dict[str, Prediction] = {}
    for name, (setup, figure, factor) in OF_PAIRS.items():
        run = runs.get(setup)
        value = _times(getattr(run, figure), factor) if run else None
        found[name] = _simulated(value, run, intervals.get(name), loads.get(setup), waits=figure != "hit_rate")
    for arm in ("sticky", "least"):
        run = runs.get(f"twelve-{arm}")
        found[f"{arm}-idle"] = _simulated(100 * run.idle_share if run else None, run, None, loads.get(f"twelve-{arm}"))
    pinned, pool = runs.get("three-pinned"), runs.get("three-pool")
    ratio = pool.requests_per_s / pinned.requests_per_s if pinned and pool and pinned.requests_per_s else None
    found["pool-requests"] = _simulated(
        ratio, pool if pinned else None, intervals.get("pool-requests"), loads.get("three-pool")
    )
    return found


def _simulated(
    value: float | None, run: SimulatedFigures | None, interval: Interval | None, load: Load | None, waits: bool = False
) -> Prediction:
    if run is None:
        return missing()
    note = ""
    if load is not None:
        note = f"{load.label}: prefill computes {load.share:.0%} of what full steps would"
    claimed = not waits or load is None or load.label == "STABLE"
    if not claimed:
        note += "; a wait at that load is not claimed"
    if interval is None:
        return Prediction(value, "simulated", note, claimed=claimed)
    return Prediction(interval.estimate, "simulated", note, interval.low, interval.high, claimed=claimed)
