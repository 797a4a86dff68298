"""The command `sim`: racks of modelled hardware, one or a grid of them, compared seed by seed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.bench.frontier import Curve, write_frontier
from rackserve.bench.statistics import Paired
from rackserve.report.curve_page import write_curve_report
from rackserve.report.curves import compare_curves
from rackserve.simulated_rack import SimulatedSetup
from rackserve.whatif.grid import Grid, Variant, read_grid
from rackserve.whatif.points import FIGURES, TRUST, Figure, PointResult, curves_of, pair_of, point_of
from rackserve.whatif.runs import ResultRow, Workload, run_all, seeds_of, workload_of
from rackserve.whatif.sensitivity import Choice, Variation, analyse, choose, varied_setups
from rackserve.whatif.show import (
    choice_text,
    costs_table,
    document,
    notes,
    pairs_table,
    points_table,
    sensitivity_table,
)

FLAGS = ("chip", "prefill_groups", "prefill_ranks", "decode_ranks", "decode_width", "policy")
"""Settings that have an option of their own; all have `--set`."""

RESULTS = "results.jsonl"


def sim(options: argparse.Namespace) -> int:
    """Run what is missing, print, write. The exit code is 1 if a set-up has no result."""
    grid = grid_of(options)
    variants, workload = grid.variants(), workload_of(options.sessions, options.trace)
    num_seeds = options.seeds or grid.num_seeds
    setups = [setup for variant in variants for setup in seeds_of(variant.setup, num_seeds)]
    if options.sensitivity:
        setups += varied_setups(variants)
    folder = _prepare(options.out)
    _print_head(variants, workload, num_seeds, options)
    try:
        rows = run_all(setups, workload, options.processes, folder / RESULTS if folder else None, _progress)
    except KeyboardInterrupt:
        kept = (
            f"what was done is in {folder / RESULTS}; the same command goes on there"
            if folder
            else "nothing was kept (no --out)"
        )
        print(f"stopped: {kept}", file=sys.stderr)
        raise
    results = [point_of(variant, rows, num_seeds) for variant in variants]
    varied: tuple[Variation, ...] = ()
    base: Choice | None = None
    if options.sensitivity:
        base, varied, bands = analyse(variants, rows, options.floor, bool(options.price))
        results = [msgspec.structs.replace(each, coefficients=bands.get(each.variant.setup)) for each in results]
    chosen = choose(results, options.floor, bool(options.price))
    lines = _report(results, rows, num_seeds, options)
    if len({variant.label for variant in variants}) > 1 or options.floor:
        lines.append(choice_text(chosen, options.floor, bool(options.price)))
    if options.sensitivity:
        lines += ["", *sensitivity_table(base, varied)]
    print("\n".join(lines))
    if folder:
        write_results(folder, grid.name, results, chosen, varied, options.floor)
        print(f"report: {folder / 'curves.html'}")
    return 1 if any(result.errors for result in results) else 0


def grid_of(options: argparse.Namespace) -> Grid:
    """The set-up file with the command line's settings over it."""
    flags = [f"{name}={value}" for name in FLAGS if (value := getattr(options, name)) is not None]
    grid = read_grid(options.config) if options.config else Grid()
    axes = list(options.grid)
    if options.concurrency is not None:
        axes.append(f"concurrency={','.join(str(number) for number in options.concurrency)}")
    return grid.with_settings([*flags, *options.overrides], axes)


def simulated_curve(path: Path | str, num_processes: int = 2, sessions: int = 393) -> Curve:
    """The curve of a set-up file, all its configurations on it. ConfigError if no point has a result."""
    grid = read_grid(path)
    variants, num_seeds = grid.variants(), grid.num_seeds
    setups = [setup for variant in variants for setup in seeds_of(variant.setup, num_seeds)]
    rows = run_all(setups, Workload(sessions), num_processes, None, _progress)
    results = [point_of(variant, rows, num_seeds) for variant in variants]
    points = tuple(point for result in results if (point := result.point) is not None)
    for result in results:
        for error in result.errors:
            print(
                f"{path}: no result for {result.variant.label} c={result.variant.setup.concurrency}: {error}", file=sys.stderr
            )
    if not points:
        raise ConfigError(f"{path}: none of its set-ups gives a point of a curve; raise concurrency or window_s")
    return Curve(grid.name or Path(path).stem, points)


def write_results(
    folder: Path,
    name: str,
    results: Sequence[PointResult],
    chosen: Choice | None,
    varied: Sequence[Variation],
    floor: float,
) -> None:
    """Summary, frontier file and page into `folder`, beside the rows that lie there already."""
    points = tuple(point for result in results if (point := result.point) is not None)
    curves = curves_of(results, name)
    comparisons = [compare_curves(curve, curves[0], at=[floor] if floor else []) for curve in curves[1:]]
    try:
        content = msgspec.json.encode(document(results, chosen, varied, floor))
        (folder / "summary.json").write_bytes(msgspec.json.format(content, indent=2) + b"\n")
        if points:
            write_frontier(folder / "frontier.json", Curve(name or folder.resolve().name, points))
            about = f"all set-ups: {shared_settings([result.variant.setup for result in results])}; {TRUST}"
            write_curve_report(folder / "curves.html", curves, comparisons, title="rackserve sim", about=about)
    except OSError as error:
        raise FileFormatError(f"{folder}: cannot be written ({error.strerror}); choose another with --out") from error


def shared_settings(setups: Sequence[SimulatedSetup]) -> str:
    """What is the same in all of these set-ups, as NAME=VALUE: a page must say which rack it shows. Seeds are left out."""
    first, *others = [msgspec.to_builtins(setup) for setup in setups]
    return " ".join(
        f"{name}={value}" for name, value in first.items() if name != "seed" and all(other[name] == value for other in others)
    )


def pairs_of(
    results: Sequence[PointResult], rows: Mapping[SimulatedSetup, ResultRow], num_seeds: int
) -> list[tuple[Variant, dict[Figure, Paired]]]:
    """Every configuration against the first at the same concurrency; waiting times only where both racks were stable."""
    first = {result.variant.setup.concurrency: result for result in results if result.variant.label == results[0].variant.label}
    found = []
    for result in results:
        base = first.get(result.variant.setup.concurrency)
        if base is None or result.variant.label == base.variant.label:
            continue
        stable = result.saturation == base.saturation == "STABLE"
        names = [name for name in FIGURES if stable or not name.startswith("ttft")]
        each = {name: pair for name in names if (pair := pair_of(result.variant, base.variant, rows, num_seeds, name))}
        found.append((result.variant, each))
    return found


def _report(
    results: Sequence[PointResult],
    rows: Mapping[SimulatedSetup, ResultRow],
    num_seeds: int,
    options: argparse.Namespace,
) -> list[str]:
    lines = [*points_table(results), *notes(results)]
    pairs = pairs_of(results, rows, num_seeds)
    if pairs:
        lines += ["", *pairs_table(results[0].variant.label, pairs, num_seeds)]
    if options.price:
        lines += ["", *costs_table(results, options.price)]
    return [*lines, ""]


def _print_head(variants: Sequence[Variant], workload: Workload, num_seeds: int, options: argparse.Namespace) -> None:
    first = msgspec.to_builtins(variants[0].setup)
    print("first set-up: " + " ".join(f"{name}={value}" for name, value in first.items()))
    extra = f" and {len(varied_setups(variants[:1]))} variations" if options.sensitivity else ""
    seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds"
    print(
        f"{len(variants)} set-up{'s' if len(variants) > 1 else ''} x {seeds}{extra}; {workload.describe()}; {TRUST}", flush=True
    )


def _progress(row: ResultRow, done: int, total: int) -> None:
    setup = row.setup
    print(f"simulated {done} of {total}: c={setup.concurrency} seed={setup.seed}", file=sys.stderr, flush=True)


def _prepare(out: str | None) -> Path | None:
    from rackserve.commands import prepare_folder

    return prepare_folder(out) if out else None
