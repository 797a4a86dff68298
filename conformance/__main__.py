"""`python -m conformance [SUITE ...]`: install what is wanted, run it without a network, print a table, write JSON.

Exit status: 0 if nothing failed that is not a named difference (what was skipped is told), 1 otherwise, 2 for a wrong name.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from conformance import network, table
from conformance.cases import Outcome, Site, Suite, SuiteError, judge
from conformance.homes import BUILD, ROOT, install
from conformance.racks import Racks
from conformance.suites import SUITES

QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LOGFIRE_SEND_TO_LOGFIRE": "false",
    "PYDANTIC_AI_HIDE_BANNER": "1",
    "OMP_NUM_THREADS": "1",
}
"""No telemetry, for those who ask the environment; what does not ask meets no network."""


def main() -> int:
    """Run the command line's suites."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that racks are ended
    console = Console(soft_wrap=True)
    chosen = _chosen(options.suites, options.on_demand)
    if options.list:
        for suite in SUITES:
            console.print(f"{suite.name}: {suite.about} {suite.pins.version if suite.pins.packages else ''}", highlight=False)
        return 0
    if not network.is_alone() and not options.network:
        for suite in chosen:
            _prepare(suite, console)
        why = network.cannot()
        if not why:
            network.go_alone(sys.argv[1:])
        console.print(f"cannot be kept from the network ({why}); run with the one there is")
        options.network = why
    isolation = f"as it is ({options.network})" if options.network else "loopback alone"
    outcomes = run(chosen, console)
    table.show(outcomes, Console())
    table.write_json(outcomes, options.json, isolation)
    markdown = options.json.with_suffix(".md")
    markdown.write_text(table.markdown(outcomes), encoding="utf-8")
    console.print(f"results, with every reason: {options.json} and {markdown}; logs of servers are not kept", highlight=False)
    return 0 if all(outcome.is_well for outcome in outcomes) else 1


def run(suites: Sequence[Suite], console: Console) -> list[Outcome]:
    """One after the other; what one leaves running or broken is no other's concern."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="rackserve-conformance-") as name:
        racks = Racks(Path(name))
        try:
            for suite in suites:
                console.print(f"{suite.name} ...", end=" ")
                outcome = _run_one(suite, racks)
                how = "skipped" if outcome.skipped else "well" if outcome.is_well else "failed"
                console.print(f"{how} after {outcome.seconds:.0f} s")
                for about, reason in () if outcome.is_well else table.told(outcome):
                    console.print(f"  {about}: {reason[:300]}", markup=False, highlight=False)
                outcomes.append(outcome)
        finally:
            racks.close()
    return outcomes


def _run_one(suite: Suite, racks: Racks) -> Outcome:
    version = suite.pins.version if suite.pins.packages else ""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rackserve-suite-") as scratch:
        try:
            home = install(suite.name, suite.pins)
        except SuiteError as error:
            return Outcome(suite.name, version, skipped=str(error))
        end = time.monotonic() + suite.deadline_s
        site = Site(home, Path(scratch), racks.get, lambda: end - time.monotonic(), dict(QUIET))
        try:
            cases = judge(suite, suite.run(site))
            return Outcome(suite.name, version, cases, time.monotonic() - begun)
        except SuiteError as error:
            return Outcome(suite.name, version, (), time.monotonic() - begun, error=str(error))
        except Exception as error:  # of the suite's own: the others still have their turn
            wrong = "".join(traceback.format_exception(error)[-2:])
            return Outcome(suite.name, version, (), time.monotonic() - begun, error=wrong)


def _prepare(suite: Suite, console: Console) -> None:
    """Have its packages fetched while there is a network; what cannot be had is found missing when the suite runs."""
    try:
        install(suite.name, suite.pins)
    except SuiteError as error:
        console.print(f"{suite.name}: {error}", markup=False)


def _chosen(names: Sequence[str], on_demand: bool) -> tuple[Suite, ...]:
    """Those named, or all that are not on demand alone."""
    unknown = set(names) - {suite.name for suite in SUITES}
    if unknown:
        print(
            f"no suite is called {', '.join(sorted(unknown))}; there are: {', '.join(suite.name for suite in SUITES)}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    if names:
        return tuple(suite for suite in SUITES if suite.name in names)
    return tuple(suite for suite in SUITES if on_demand or not suite.on_demand)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="which (default: all but those on demand)")
    parser.add_argument("--on-demand", action="store_true", help="also those that take long: aiperf and agentx")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument(
        "--network", nargs="?", const="asked for", default="", metavar="WHY", help="do not take the network away"
    )
    parser.add_argument(
        "--json", type=Path, default=BUILD / "result.json", metavar="FILE", help="where to (default %(default)s)"
    )
    return parser


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(main())
