"""The simulated curves of both racks as files that `rackserve compare` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rackserve.bench.frontier import Curve, OperatingPoint, write_frontier
from rackserve.reproduction.setups import SLICE
from rackserve.simulated_rack import SimulatedFigures, SimulatedSetup

NAMES = {"rubin": "Rubin, simulated", "gb300": "GB300, simulated"}
TRUST = "step times from the cost model, not calibrated"


def curve_of(chip: str, setups: Mapping[str, SimulatedSetup], runs: Mapping[str, SimulatedFigures]) -> Curve:
    """The points of `chip` that had a speed; sessions and requests are those of the whole rack where a slice was run."""
    points = []
    for name, run in runs.items():
        if not name.startswith(f"{chip}-") or run.interactivity_p90 is None:
            continue
        setup, scale = setups[name], 1 if "recipe" in name else SLICE
        points.append(
            OperatingPoint(
                f"{setup.prefill_groups * setup.prefill_ranks * scale}P+{setup.decode_ranks * scale}D",
                setup.concurrency * scale,
                run.interactivity_p90,
                run.total_per_gpu,
                num_gpus=setup.num_gpus * scale,
                ttft_p50_ms=None if run.ttft_p50_s is None else 1e3 * run.ttft_p50_s,
                ttft_p90_ms=None if run.ttft_p90_s is None else 1e3 * run.ttft_p90_s,
                hit_rate=run.hit_rate,
                requests_per_s=run.requests_per_s * scale,
                trust=TRUST,
            )
        )
    return Curve(NAMES[chip], tuple(points))


def write_curves(folder: Path, setups: Mapping[str, SimulatedSetup], runs: Mapping[str, SimulatedFigures]) -> None:
    """Write `rubin.json` and `gb300.json` into `folder`, unless a curve has no point."""
    for chip in NAMES:
        curve = curve_of(chip, setups, runs)
        if curve.points:
            write_frontier(folder / f"{chip}.json", curve)
