"""`rackserve reproduce`: the published figures beside what the cost model and simulated racks give."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rackserve.arguments import at_least
from rackserve.base.errors import RackserveError
from rackserve.reproduction.confidence import Rows, intervals, loads, mean_figures
from rackserve.reproduction.curve_files import write_curves
from rackserve.reproduction.figures import published
from rackserve.reproduction.predictions import predict
from rackserve.reproduction.setups import all_setups, at_step_times, three_pairs, twelve_pairs
from rackserve.reproduction.table import document, markdown, rows_of
from rackserve.simulated_rack import SimulatedSetup
from rackserve.whatif.runs import ResultRow, Workload, run_all, seeds_of, workload_of

RUNS = "runs.jsonl"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--trace", metavar="FILE", help="agent sessions to simulate with (default: drawn ones)")
    command.add_argument("--sessions", type=at_least(1), default=393, metavar="N", help="how many of them (default 393)")
    command.add_argument("--processes", type=at_least(1), default=2, metavar="N", help="simulations side by side (default 2)")
    command.add_argument("--seeds", type=at_least(1), default=1, metavar="N", help="seeds of set-ups in pairs (default 1)")
    command.add_argument("--bands", action="store_true", help="the pairs also with steps 5 %% longer and shorter")
    command.add_argument("--quick", action="store_true", help="the cost model's figures alone: no simulation")
    command.add_argument("--out", metavar="FOLDER", help="write runs, table and both curves there; runs found there are kept")


def reproduce(options: argparse.Namespace) -> int:
    """Simulate all set-ups (with --quick none), print the table and write it. FileFormatError for a bad trace.

    With --out, what was simulated before for the same set-up, sessions and version is read from there and not run again.
    """
    workload = workload_of(options.sessions, options.trace)
    folder = Path(options.out) if options.out else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    rows = {} if options.quick else _simulated(options, workload, folder / RUNS if folder else None)
    runs, found = mean_figures(rows), loads(rows)
    head = (
        f"Workload: {workload.describe()}; {_seeds(rows)}."
        if rows
        else "Figures of the cost model alone: nothing was simulated."
    )
    table = rows_of(published(), predict(runs, intervals(rows), found))
    text = markdown(table, runs, head, found)
    print(text, end="")
    if folder:
        (folder / "reproduction.md").write_text(text)
        (folder / "reproduction.json").write_bytes(document(table, runs, head, found))
        write_curves(folder, all_setups(), runs)
    return 0


def _simulated(options: argparse.Namespace, workload: Workload, path: Path | None) -> Rows:
    """Rows of every set-up by name: the pairs under all seeds, curves under one. RackserveError for one that cannot run."""
    pairs = three_pairs() | twelve_pairs()
    wanted = {name: seeds_of(setup, options.seeds if name in pairs else 1) for name, setup in all_setups().items()}
    if options.bands:
        wanted |= {name: [setup] for name, setup in at_step_times().items()}
    done = run_all((setup for setups in wanted.values() for setup in setups), workload, options.processes, path, _tell)
    found = {name: [done[setup] for setup in setups] for name, setups in wanted.items()}
    for name, rows in found.items():
        for row in rows:
            if row.error:
                raise RackserveError(f"set-up {name}: {row.error}")
    return found


def _tell(row: ResultRow, done: int, total: int) -> None:
    setup: SimulatedSetup = row.setup
    shape = f"{setup.chip}, {setup.prefill_groups} groups, {setup.concurrency} sessions, seed {setup.seed}"
    print(f"simulated {done} of {total}: {shape}", file=sys.stderr, flush=True)


def _seeds(rows: Rows) -> str:
    most: Sequence[ResultRow] = max(rows.values(), key=len)
    return f"seed {most[0].setup.seed}" if len(most) == 1 else f"pairs under {len(most)} seeds, curves under one"
