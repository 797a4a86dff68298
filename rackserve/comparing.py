"""`rackserve compare`: two curves side by side in the terminal, and as a page and a file."""

from __future__ import annotations

import argparse
from math import inf, isfinite
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from rackserve.arguments import at_least, number_within
from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.bench.frontier import MEASURES, Curve, read_curve
from rackserve.report.curve_page import write_curve_report
from rackserve.report.curves import RULE, Cost, CurveComparison, Line, Match, compare_curves, cost_at
from rackserve.what_if import simulated_curve
from rackserve.whatif.grid import is_grid


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    for name, metavar in (("first", "A"), ("second", "B")):
        command.add_argument(
            name, metavar=metavar, help="a frontier file, a run's summary, a folder of either, or a set-up file to simulate"
        )
    command.add_argument(
        "--by", choices=["total", "cached", "uncached", "output"], default="total", help="which throughput (default total)"
    )
    command.add_argument(
        "--at", type=number_within(1e-6, 1e9), nargs="+", default=[], metavar="SPEED", help="also compare at these tok/s/user"
    )
    command.add_argument(
        "--tolerance",
        type=number_within(0, 0.5),
        default=0.02,
        metavar="SHARE",
        help="how well either curve's speed is known, for the bounds (default 0.02)",
    )
    command.add_argument(
        "--price",
        type=number_within(0, 1e6),
        nargs="+",
        default=[],
        metavar="P",
        help="per GPU-hour: one price, or one for each",
    )
    command.add_argument(
        "--requests-per-session",
        type=number_within(1, 1e9),
        metavar="N",
        help="for the cost of a session (default: what the files say)",
    )
    command.add_argument("--processes", type=at_least(1), default=2, metavar="N", help="simulations side by side (default 2)")
    command.add_argument("--out", metavar="FOLDER", help="write compare.json and compare.html there")


def compare(options: argparse.Namespace) -> int:
    """Compare the curves in two result files, or of set-up files, which are simulated first."""
    first, second = (_curve(path, options.processes) for path in (options.first, options.second))
    if first.name == second.name:
        first, second = (
            msgspec.structs.replace(curve, name=f"{curve.name} ({at})") for curve, at in ((first, "A"), (second, "B"))
        )
    result = compare_curves(first, second, options.by, options.at, options.tolerance)
    console = Console()
    print_curves(result, console)
    if told := one_seed_text((first, second), options.tolerance):
        console.print(told, soft_wrap=True, highlight=False)
    costs = price_curves(first, second, result, options.price, options.requests_per_session) if options.price else {}
    if any(costs.values()):
        console.print(_cost_table(costs))
    elif costs:
        console.print("no costs: the files give neither the parts of the throughput nor requests/s", highlight=False)
    for curve in (first, second):
        for point in curve.points:
            if not point.valid:
                console.print(f"left out: {curve.name} {point.label}, c = {point.concurrency}: an invalid run", highlight=False)
    if options.out:
        _write(Path(options.out), [first, second], result, costs)
        console.print(f"report: {Path(options.out) / 'compare.html'}", highlight=False)
    return 0


def one_seed_text(curves: tuple[Curve, Curve], tolerance: float) -> str:
    """What the bounds leave out where a curve was simulated under one seed; empty if none was."""
    found = {
        name: curve.points for name, curve in zip("AB", curves, strict=True) if any(p.num_seeds == 1 for p in curve.points)
    }
    if not found:
        return ""
    halves = {
        name: max(
            ((p.seeds.per_gpu[1] - p.seeds.per_gpu[0]) / 2 / p.per_gpu for p in points if p.seeds and p.per_gpu), default=None
        )
        for name, points in found.items()
    }
    spread = " and ".join(f"±{half:.0%} of {name}'s throughput" for name, half in halves.items() if half is not None)
    known = f", which sim gave as up to {spread}" if spread else ""
    whose = "One seed each" if len(found) == 2 else f"One seed for {next(iter(found))}"
    return f"{whose}: the bounds hold the curves' tolerance (±{tolerance:.0%} of speed), not the spread of draws{known}."


def _curve(path: str, num_processes: int) -> Curve:
    """The curve in a result file, or what a set-up file gives when it is simulated."""
    return simulated_curve(path, num_processes) if is_grid(path) else read_curve(path)


def price_curves(
    first: Curve, second: Curve, result: CurveComparison, prices: list[float], requests_per_session: float | None
) -> dict[str, list[Cost]]:
    """Costs by curve at each matched interactivity at which any is known; one price holds for both. ConfigError for three."""
    if len(prices) > 2:
        raise ConfigError(f"--price: give one price per GPU-hour, or one for each curve, got {len(prices)}")
    lines = (Line(first, result.measure), Line(second, result.measure))
    places = [match.interactivity for match in result.matches]
    costs = {
        line.name: [cost_at(line, place, price, requests_per_session) for place in places if place <= line.end]
        for line, price in zip(lines, (prices[0], prices[-1]), strict=True)
    }
    return {name: [cost for cost in each if cost.known] for name, each in costs.items()}


def _amount(value: float | None) -> str:
    if value is None:
        return "–"
    if value == inf:
        return "∞"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or abs(value) >= size > 1e3:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def match_cells(match: Match) -> tuple[str, ...]:
    """One row: interactivity, both throughputs, the multiple, its bounds, its elasticity, the shares of peak kept."""
    ratio = "–" if match.ratio is None else f"{_amount(match.ratio)}×{' !' if match.useless else ''}"
    bounds = "–" if match.low is None else f"{_amount(match.low)} to {_amount(match.high)}"
    kept = " / ".join(
        "–" if share is None else f"{share:.{1 if share < 0.1 else 0}%}" for share in (match.kept_above, match.kept_below)
    )
    elasticity = "ends" if match.elasticity is not None and not isfinite(match.elasticity) else _amount(match.elasticity)
    return (_amount(match.interactivity), _amount(match.above), _amount(match.below), ratio, bounds, elasticity, kept)


def print_curves(result: CurveComparison, console: Console) -> None:
    """The multiples along the curve, the rule, and the paragraph that explains them."""
    above, below = result.names
    console.print(f"A = {above}, B = {below}; tokens/s per GPU, {MEASURES[result.measure]}", highlight=False)
    for name, trust in zip("AB", result.trusts, strict=True):
        if trust:
            console.print(f"{name} is simulated: {trust}", highlight=False)
    table = Table(show_edge=False, pad_edge=False)
    heads = ("tok/s/user", "A", "B", "A / B", f"at ±{result.tolerance:.0%}", "elasticity", "keep of peak")
    for head in heads:
        table.add_column(head, justify="right")
    for match in result.matches:
        table.add_row(*match_cells(match))
    table.add_row("peak", _amount(result.peaks[0]), _amount(result.peaks[1]), f"{_amount(result.peak_ratio)}×", "", "", "")
    console.print(table)
    if any(match.useless for match in result.matches):
        console.print("!: bounds over a factor of 2 apart, so the multiple means nothing", highlight=False)
    console.print(result.text, soft_wrap=True, highlight=False)
    console.print(f"Rule: {RULE}.", soft_wrap=True, highlight=False)


def _cost_table(costs: dict[str, list[Cost]]) -> Table:
    table = Table(show_edge=False, pad_edge=False, title="cost; for each kind of token the whole cost", title_justify="left")
    heads = ("", "tok/s/user", "M cached", "M uncached", "M output", "request", "session")
    for head in heads:
        table.add_column(head, justify="left" if not head else "right")
    for name, rows in zip("AB", costs.values(), strict=True):
        for cost in rows:
            table.add_row(name, *("–" if value is None else f"{value:,.4g}" for value in msgspec.structs.astuple(cost)))
    return table


def _write(folder: Path, curves: list[Curve], result: CurveComparison, costs: dict[str, list[Cost]]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        document = msgspec.to_builtins(result) | {"costs": msgspec.to_builtins(costs)}
        (folder / "compare.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        write_curve_report(folder / "compare.html", curves, [result], costs)
    except OSError as error:
        raise FileFormatError(f"{folder}: cannot be written ({error.strerror}); choose another with --out") from error
