"""The command line. Modules are imported by the command that needs them, so that `--help` is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rackserve import __version__
from rackserve.arguments import at_least, number_within
from rackserve.base.errors import RackserveError
from rackserve.base.memory_plan import USABLE
from rackserve.bench_options import add_bench, add_simulate, add_synthesize
from rackserve.route_options import add_route
from rackserve.sim_options import add_sim


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    main_parser = argparse.ArgumentParser(
        prog="rackserve", description="Serve agent sessions from a rack, measure the curve, and simulate what you do not own."
    )
    main_parser.add_argument("--version", action="version", version=f"rackserve {__version__}")
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(commands.add_parser("serve", help="start a rack on this machine with an OpenAI-compatible front end"))
    add_route(commands.add_parser("route", help="put a cache-aware router in front of OpenAI-compatible servers"))
    _add_demo(commands.add_parser("demo", help="replay agent sessions on two set-ups, live and simulated, and compare"))
    add_bench(commands.add_parser("bench", help="replay agent sessions against any OpenAI-compatible endpoint"))
    _add_simulate(commands.add_parser("simulate", help="replay agent sessions on a simulated copy of a rack you can start"))
    add_sim(commands.add_parser("sim", help="what if: racks of chips you do not own, one or a grid of them, compared"))
    add_synthesize(commands.add_parser("synthesize", help="draw agent sessions like those of a published corpus, as a trace"))
    _add_swarm(commands.add_parser("swarm", help="run random small racks with faults in simulation and check every law"))
    _add_compare(
        commands.add_parser("compare", help="two results or set-ups: multiples along the curve, at peak, and what they mean")
    )
    _add_record(
        commands.add_parser("record", help="turn what `serve --record` wrote into a trace that bench and simulate replay")
    )
    _add_plan_memory(commands.add_parser("plan-memory", help="what a DeepSeek-V4.1 model takes, in all and on each device"))
    _add_serve_rows(
        commands.add_parser("serve-rows", help="own a shard of a DeepSeek-V4.1 model's n-gram tables for other ranks")
    )
    _add_cost_model(commands.add_parser("cost-model", help="what one step takes on hardware you do not own, term by term"))
    _add_calibrate(commands.add_parser("calibrate", help="fit step costs to recorded runs, with the error on unseen steps"))
    _add_reproduce(commands.add_parser("reproduce", help="published figures beside what the cost model and simulation give"))
    _add_validate(commands.add_parser("validate", help="measurements of others beside what the cost model and caches give"))
    return main_parser


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", metavar="FILE", help="settings in TOML or YAML")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="overrides",
        help="one setting, such as router.policy=least_load",
    )


def _add_serve(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", help="embedded (the default), or a folder with a Llama or DeepSeek-V4.1 model in Hugging Face form"
    )
    command.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    command.add_argument("--port", type=int, help="port to listen on (default 8000; 0: any free one)")
    command.add_argument("--events", metavar="FILE", help="write every recorded event to FILE as JSON lines")
    command.add_argument(
        "--record", metavar="FILE", help="write lengths, times and digests of blocks of all requests to FILE, for `record`"
    )
    _add_settings(command)


def _add_demo(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out", metavar="FOLDER", help="where report and recordings go (default runs/demo, or runs/demo-MODEL-PARALLEL)"
    )
    command.add_argument(
        "--model",
        choices=["embedded", "golden"],
        default="embedded",
        help="embedded (the default) or golden: a tiny DeepSeek-V4.1 of random weights, with drafts and Engram",
    )
    command.add_argument(
        "--parallel", choices=["tp2", "dep2"], help="two devices a rank (tensor parallel), or two ranks a worker (in lockstep)"
    )
    command.add_argument("--seed", type=int, action="append", help="run this seed; may be given several times (default 42)")
    command.add_argument("--live-only", action="store_true", help="leave out the simulation")
    command.add_argument(
        "--serial", action="store_true", help="arm b only, one request at a time; live and simulated must agree"
    )
    command.add_argument("--verify", action="store_true", help="compare every answer with a cold run of one rank (minutes)")
    command.add_argument("--concurrency", type=at_least(0), default=0, help="live session trees (default 0: the demo's own)")
    _add_settings(command)


def _add_simulate(command: argparse.ArgumentParser) -> None:
    add_simulate(command)
    _add_settings(command)


def _add_swarm(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seeds", type=at_least(1), default=100, help="run seeds 0..N-1 (default 100)")
    command.add_argument("--seed", type=int, help="run this one alone and describe it")


def _add_serve_rows(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, help="folder of the model, or golden")
    command.add_argument("--shard", type=at_least(0), default=0, metavar="I", help="which shard, from 0 (default 0)")
    command.add_argument("--of", type=at_least(1), default=1, metavar="N", help="into how many the tables are cut (default 1)")
    command.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="ipc://@name, ipc:///path or tcp://host:port (no secret: rack network only)",
    )


def _add_compare(command: argparse.ArgumentParser) -> None:
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


def _add_record(command: argparse.ArgumentParser) -> None:
    command.add_argument("recording", metavar="FILE", help="what `serve --record` wrote")
    command.add_argument(
        "--out", required=True, metavar="TRACE", help="trace file to write, compressed if its name ends with .gz"
    )


def _add_plan_memory(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        metavar="FILE",
        help="the model's config.json or its folder (default: deepseek-v4.1-flash, which is shipped)",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="overrides",
        help="one setting, such as topology.prefill_tp=8",
    )
    device = command.add_mutually_exclusive_group()
    device.add_argument("--device-memory", metavar="SIZE", help="refuse what does not fit: 141GB, 80GiB or a number of bytes")
    device.add_argument("--device", metavar="NAME", help="the same by a device's name, such as h200")
    command.add_argument(
        "--usable",
        type=number_within(0.01, 1),
        default=USABLE,
        metavar="SHARE",
        help=f"share of that memory to plan with (default {USABLE:g})",
    )
    command.add_argument(
        "--engram-shards",
        type=at_least(0),
        metavar="N",
        help="devices that share the Engram tables (default: those of a group; 0: tables outside the devices)",
    )


def _add_cost_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="deepseek-v4.1-flash", metavar="NAME", help="default deepseek-v4.1-flash")
    command.add_argument("--chip", default="gb300", metavar="NAME", help="default gb300; a wrong name lists all")
    command.add_argument("--kernels", metavar="NAME", help="a set of coefficients (default: the chip's own)")
    command.add_argument("--role", choices=["prefill", "decode"], default="decode", help="default decode")
    command.add_argument("--tp", type=at_least(1), default=1, help="chips that compute a rank together (default 1)")
    command.add_argument(
        "--ep",
        type=at_least(1),
        help="ranks in lockstep that share the experts (default: 1, 2, 4 ..., as few as hold the model)",
    )
    command.add_argument(
        "--table-shards", type=at_least(0), default=0, metavar="N", help="chips that share lookup tables (default 0: the host)"
    )
    command.add_argument("--sequences", type=at_least(1), default=16, help="decode: sequences of each rank (default 16)")
    command.add_argument("--drafts", type=at_least(0), default=5, help="decode: drafts to verify per sequence (default 5)")
    command.add_argument(
        "--tokens", type=at_least(1), default=8192, help="prefill: positions of each rank's chunk (default 8192)"
    )
    command.add_argument("--tail", type=at_least(0), help="prefill: of those, how many pass every layer (default: all)")
    command.add_argument("--context", type=at_least(0), default=142_000, help="positions before those (default 142000)")


def _add_calibrate(command: argparse.ArgumentParser) -> None:
    command.add_argument("recordings", nargs="+", metavar="FILE", help="recordings of live runs, as demo and bench write them")
    command.add_argument("--out", metavar="FILE", help="write the costs there, for `simulate --costs`")


def _add_reproduce(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trace", metavar="FILE", help="agent sessions to simulate with (default: drawn ones)")
    command.add_argument("--sessions", type=at_least(1), default=393, metavar="N", help="how many of them (default 393)")
    command.add_argument("--processes", type=at_least(1), default=2, metavar="N", help="simulations side by side (default 2)")
    command.add_argument("--seeds", type=at_least(1), default=5, metavar="N", help="seeds of set-ups in pairs (default 5)")
    command.add_argument("--bands", action="store_true", help="the pairs also with steps 5 %% longer and shorter")
    command.add_argument("--quick", action="store_true", help="the cost model's figures alone: no simulation")
    command.add_argument("--out", metavar="FOLDER", help="write runs, table and both curves there; runs found there are kept")


def _add_validate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--silicon", metavar="FILE", help="table of measured points in AIConfigurator's form, CSV, plain or gzip"
    )
    command.add_argument("--mooncake", metavar="FILE", help="Mooncake's conversation trace, JSONL, plain or gzip")
    command.add_argument("--requests", metavar="FILE", help="LLMServingSim's measured requests on RTX PRO 6000, JSONL")
    command.add_argument(
        "--sessions", metavar="FILE", help="agent sessions: pool against caches of ranks by cache size; minutes"
    )
    command.add_argument("--set-ups", action="store_true", help="published set-ups that need no file, simulated; minutes")
    command.add_argument("--history", metavar="FILE", help="say what moved since its last line; append a line")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; expected failures become one line on standard error and an exit code."""
    options = parser().parse_args(arguments)
    try:
        return _run(options)
    except RackserveError as error:
        print(f"rackserve: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("rackserve: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(options: argparse.Namespace) -> int:
    if options.command == "plan-memory":  # needs far less than the others
        from rackserve.plan_memory import plan_memory

        return plan_memory(options)
    if options.command == "route":
        from rackserve.routing import route

        return route(options)
    if options.command == "serve-rows":
        from rackserve.serve_rows import serve_rows

        return serve_rows(options)
    if options.command == "cost-model":
        from rackserve.cost_model import cost_model

        return cost_model(options)
    if options.command == "calibrate":
        from rackserve.calibrate import run_calibrate

        return run_calibrate(options)

    if options.command == "reproduce":
        from rackserve.reproduce import reproduce

        return reproduce(options)
    if options.command == "validate":
        from rackserve.validate import validate

        return validate(options)
    if options.command == "sim":
        from rackserve.what_if import sim

        return sim(options)
    if options.command == "compare":
        from rackserve.comparing import compare

        return compare(options)
    if options.command == "record":
        from rackserve.traffic import record

        return record(options)

    from rackserve import benchmark, commands, demo

    run = {
        "serve": commands.serve,
        "demo": demo.run_demo,
        "bench": benchmark.bench,
        "synthesize": benchmark.synthesize,
        "simulate": commands.simulate,
        "swarm": commands.swarm,
    }[options.command]
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
