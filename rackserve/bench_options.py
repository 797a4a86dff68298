"""The options of the commands that replay traces: bench, simulate and synthesize."""

from __future__ import annotations

import argparse

from rackserve.arguments import add_settings, at_least, name_and_value, number_within, whole_numbers


def add_trace(command: argparse.ArgumentParser) -> None:
    """What to replay, and how much of it; `bench` and `simulate` share these."""
    command.add_argument("--trace", metavar="FILE", help="sessions, in a format of docs/traces.md (default: the shipped ones)")
    command.add_argument("--limit", type=at_least(0), default=0, help="read only the first N sessions (0: all)")
    command.add_argument("--scale", type=at_least(1), default=32, help="divide all token counts by this (default 32)")
    command.add_argument(
        "--time-scale", type=number_within(0.001, 1e9), default=100.0, help="divide all pauses by this (default 100)"
    )
    command.add_argument("--max-turns", type=at_least(0), default=0, help="turns of a session to replay (0: all)")
    command.add_argument(
        "--max-context", type=at_least(0), default=0, help="end a session before a prompt would exceed this (0: no limit)"
    )
    command.add_argument("--serial", action="store_true", help="one request in flight over everything, in the trace's order")
    command.add_argument("--out", metavar="FOLDER", help="write the recording, summary and report there")
    command.add_argument("--export", metavar="TRACE", help="write what was sent, with the times that came about, as a trace")


def add_simulate(command: argparse.ArgumentParser) -> None:
    """Options of `simulate`."""
    command.add_argument("--costs", metavar="FILE", help="step costs fitted by an earlier demo (costs.json); else assumed ones")
    command.add_argument("--concurrency", type=at_least(1), default=4, help="live session trees (default 4)")
    add_trace(command)
    add_settings(command)


def add_synthesize(command: argparse.ArgumentParser) -> None:
    """Options of `synthesize`."""
    command.add_argument("--sessions", type=at_least(1), default=393, help="how many to draw (default 393)")
    command.add_argument("--seed", type=int, default=42, help="each session is a function of seed and number (default 42)")
    command.add_argument("--out", metavar="TRACE", help="trace file to write, compressed if its name ends with .gz")


def add_bench(command: argparse.ArgumentParser) -> None:
    """Options of `bench`."""
    _add_endpoint(command)
    load = command.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=whole_numbers(1),
        default=(4,),
        metavar="N[,N...]",
        help="live session trees; several numbers run one after the other and give a frontier (default 4)",
    )
    load.add_argument(
        "--agentx",
        action="store_true",
        help="the rules of that benchmark: --start-window 0.25 0.75 --warmup-requests 10 --recycle --separate-agents, lengths "
        "and pauses as recorded, --deadline 3600; what is given beside it wins and is named as a deviation",
    )
    load.add_argument(
        "--recycle", action="store_true", help="replay the sessions again and again, as new ones, to the deadline"
    )
    load.add_argument(
        "--start-window",
        type=number_within(0, 1),
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="begin the first sessions at a drawn share of their length, caches warmed",
    )
    load.add_argument(
        "--warmup-requests", type=at_least(0), metavar="N", help="then N further one-token requests of each, without pauses"
    )
    load.add_argument(
        "--separate-agents", action="store_true", help="tell agents that share one list of requests apart by their prefixes"
    )
    load.add_argument(
        "--open-loop", action="store_true", help="send every request at its time, whatever became of those before"
    )
    load.add_argument(
        "--rate", type=number_within(1e-6, 1e6), metavar="R", help="open loop: R sessions a second (default: as recorded)"
    )
    load.add_argument(
        "--arrival", choices=["poisson", "constant"], default="poisson", help="open loop: how they follow each other"
    )
    load.add_argument(
        "--deadline",
        type=number_within(0, 1e7),
        help="end the run this many seconds after its warming up; 0 (the default): when done",
    )
    load.add_argument("--seed", type=int, default=42, help="draws starting points, arrivals and prompts (default 42)")
    load.add_argument(
        "--salt", metavar="TEXT", help="goes into all prompts, so that no run hits what another left behind (default: drawn)"
    )
    load.add_argument(
        "--vocabulary",
        type=at_least(0),
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="draw the prompts' token ids from LOW to HIGH - 1 (default 1000 to 39999)",
    )
    add_trace(command)
    command.set_defaults(scale=None, time_scale=None)  # what they are depends on --agentx


def _add_endpoint(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", required=True, help="base URL of the server, such as http://127.0.0.1:8000")
    command.add_argument("--model", default="", help="model name to ask for (default: the server's first)")
    command.add_argument(
        "--endpoint",
        choices=["completions-tokens", "completions", "chat"],
        default="completions-tokens",
        help="how prompts are sent; the first sends token ids",
    )
    command.add_argument("--api-key", default="", help="bearer token")
    command.add_argument(
        "--header", type=name_and_value, action="append", default=[], metavar="NAME=VALUE", help="sent with every request"
    )
    command.add_argument(
        "--dp-ranks",
        type=at_least(0),
        default=0,
        metavar="N",
        help="pin each session to one of N data-parallel ranks, by the header X-data-parallel-rank",
    )
    command.add_argument(
        "--request-deadline", type=number_within(0.001, 1e6), default=600.0, help="seconds a request may take (default 600)"
    )
    command.add_argument(
        "--max-connections",
        type=at_least(0),
        default=0,
        metavar="N",
        help="requests in flight at once (0: as many as it takes)",
    )
    command.add_argument(
        "--gpus", type=at_least(1), default=1, help="GPUs behind the endpoint, for per-GPU figures (default 1)"
    )
