"""`rackserve reproduce`: the published figures beside what the cost model and simulated racks give."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from rackserve.reproduction.curve_files import write_curves
from rackserve.reproduction.figures import published
from rackserve.reproduction.predictions import predict
from rackserve.reproduction.setups import all_setups
from rackserve.reproduction.table import document, markdown, rows_of
from rackserve.reproduction.workload import agent_sessions
from rackserve.simulated_rack import BLOCK_TOKENS, SimulatedFigures, SimulatedSetup, simulate_rack


def reproduce(options: argparse.Namespace) -> int:
    """Simulate all set-ups (with --quick none), print the table and write it. FileFormatError for a bad trace."""
    trace = Path(options.trace) if options.trace else None
    if trace:
        agent_sessions(1, BLOCK_TOKENS, trace)  # a file that cannot be read is refused before anything runs
    setups = {} if options.quick else all_setups()
    runs = simulate_all(setups, trace, options.sessions, options.processes)
    source = (
        f"the first {options.sessions} sessions of {trace.name}" if trace else f"{options.sessions} drawn sessions, seed 42"
    )
    head = f"Workload: {source}." if runs else "Figures of the cost model alone: nothing was simulated."
    rows = rows_of(published(), predict(runs))
    text = markdown(rows, runs, head)
    print(text, end="")
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reproduction.md").write_text(text)
        (folder / "reproduction.json").write_bytes(document(rows, runs, head))
        write_curves(folder, setups, runs)
    return 0


def simulate_all(
    setups: Mapping[str, SimulatedSetup], trace: Path | None, num_sessions: int, num_processes: int
) -> dict[str, SimulatedFigures]:
    """Every set-up by name, in their order; the result does not depend on how many processes share the work."""
    if not setups:
        return {}
    found: dict[str, SimulatedFigures] = {}
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {pool.submit(_simulate, setup, trace, num_sessions): name for name, setup in setups.items()}
        for future in as_completed(waiting):
            found[waiting[future]] = future.result()
            print(f"simulated {len(found)} of {len(setups)}: {waiting[future]}", file=sys.stderr, flush=True)
    return {name: found[name] for name in setups}


def _simulate(setup: SimulatedSetup, trace: Path | None, num_sessions: int) -> SimulatedFigures:
    return simulate_rack(setup, agent_sessions(num_sessions, BLOCK_TOKENS, trace))
