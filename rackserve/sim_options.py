"""The options of `rackserve sim`."""

from __future__ import annotations

import argparse

from rackserve.arguments import at_least, number_within, whole_numbers

EPILOG = """examples:
  rackserve sim --concurrency 200,400,800
  rackserve sim --grid pool=true,false --set prefill_groups=3 --out runs/pool
  rackserve sim --grid prefill_groups+decode_ranks=3+2,2+4 --floor 300 --price 4 --sensitivity
`simulate` replays on a simulated copy of a rack that `serve` can start, with step times measured there; `sim` on chips that
nobody here owns, with step times from the cost model."""


def add_sim(command: argparse.ArgumentParser) -> None:
    """What is simulated, how often, and what is made of it."""
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = EPILOG
    rack = command.add_argument_group("set-up")
    rack.add_argument("--config", metavar="FILE", help="a set-up file: settings and axes of a grid (docs/what_if.md)")
    rack.add_argument("--chip", metavar="NAME", help="vr (the default) or gb300")
    rack.add_argument("--prefill-groups", metavar="N", help="prefill groups (default 2)")
    rack.add_argument("--prefill-ranks", metavar="N", help="ranks of each in lockstep (default 2: DEP2)")
    rack.add_argument("--decode-ranks", metavar="N", help="simulated decode ranks (default 2)")
    rack.add_argument("--decode-width", metavar="N", help="ranks of the decode group they are a part of (default 24)")
    rack.add_argument("--policy", metavar="NAME", help="where requests go (default least_uncached_work)")
    rack.add_argument(
        "--concurrency", type=whole_numbers(1), metavar="N[,N...]", help="live sessions; several span a curve (default 400)"
    )
    rack.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="overrides", help="any setting; a wrong name lists all"
    )
    rack.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="NAME=V[,V...]",
        help="try each value; several axes span a grid; A+B=1+2,3+4 moves two settings together",
    )
    runs = command.add_argument_group("runs")
    runs.add_argument(
        "--seeds", type=at_least(1), metavar="N", help="runs of each set-up (default: 5 to compare configurations, else 1)"
    )
    runs.add_argument("--trace", metavar="FILE", help="agent sessions (default: drawn ones, others for every seed)")
    runs.add_argument("--sessions", type=at_least(1), default=393, metavar="N", help="how many of them (default 393)")
    runs.add_argument("--processes", type=at_least(1), default=2, metavar="N", help="simulations side by side (default 2)")
    runs.add_argument(
        "--out",
        metavar="FOLDER",
        help="write results there, each run as it ends; the same command goes on where it was stopped",
    )
    made = command.add_argument_group("what is made of them")
    made.add_argument(
        "--floor",
        type=number_within(0, 1e6),
        default=0.0,
        metavar="SPEED",
        help="recommend at this tok/s/user (default: at peak)",
    )
    made.add_argument(
        "--price", type=number_within(1e-9, 1e6), metavar="P", help="per GPU-hour: costs, and the cheapest is best"
    )
    made.add_argument(
        "--sensitivity",
        action="store_true",
        help="run every set-up with groups of coefficients 10 and 20 %% off (20 runs more): does the recommendation hold?",
    )
