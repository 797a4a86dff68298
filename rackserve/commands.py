"""What each command of the command line does."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from rackserve.api.logs import start_logging
from rackserve.arguments import add_address, add_settings, address_overrides, at_least
from rackserve.base.costs import StepCost
from rackserve.base.errors import FileFormatError, InvariantError
from rackserve.bench.demo import demo_sessions
from rackserve.bench.export import sent_sessions
from rackserve.bench.metrics import failures_of, result_json
from rackserve.bench.native import write_sessions
from rackserve.bench.records import Recording, write_recording
from rackserve.bench.scale import ScaledTrace, scale_sessions
from rackserve.bench.trace import read_sessions
from rackserve.config import Settings, load_settings, resolve
from rackserve.live.recorder import JsonlFile
from rackserve.live.runner import layout_of
from rackserve.replay import ASSUMED_COSTS, ReplaySpec, arm_of, replay_simulated
from rackserve.report.compare import Arm, print_comparison
from rackserve.report.html import write_report
from rackserve.sim.store import LinkCost
from rackserve.sim.swarm import SwarmResult
from rackserve.traffic import TrafficLog


def print_settings(settings: Settings) -> None:
    """The resolved settings and seed, one section a line, before anything else happens."""
    print("settings (change any with --set section.key=value or --config):")
    sections: dict[str, list[str]] = {}
    for line in settings.as_text().splitlines():
        name, value = line.split(" = ", 1)
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key}={value}" if key else value)
    for section, pairs in sections.items():
        print(f"  {section}: {' '.join(pairs)}")
    sys.stdout.flush()


# ---------------------------------------------------------------- serve


def add_serve(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_address(command)
    command.add_argument("--events", metavar="FILE", help="write every recorded event to FILE as JSON lines")
    command.add_argument(
        "--record", metavar="FILE", help="write lengths, times and digests of blocks of all requests to FILE, for `record`"
    )
    add_settings(command)


def serve(options: argparse.Namespace) -> int:
    given = [*options.overrides, *address_overrides(options)]
    settings = resolve(options.config, given, environment=os.environ).for_clients().sized()
    start_logging(settings.server.log)
    print_settings(settings)
    traffic = TrafficLog(options.record, layout_of(settings.runner).block_tokens) if options.record else None
    try:
        return asyncio.run(_serve(settings, options.events, traffic))
    finally:
        if traffic is not None:
            traffic.close()


REPEAT_S = 0.2
"""A signal that comes this soon after another is the same one."""


async def _serve(settings: Settings, events: str | None, traffic: TrafficLog | None) -> int:
    """Serve until a signal: the first one drains (or ends a start-up), a second one interrupts."""
    from rackserve.live.computing import engine_lines
    from rackserve.serving import OpenServer, open_server

    sinks = [_events_file(events)] if events else []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    num_signals, last_signal = 0, -REPEAT_S
    server: OpenServer | None = None

    def on_signal() -> None:
        nonlocal num_signals, last_signal
        if loop.time() - last_signal < REPEAT_S:  # some tools signal a process, then its whole group: that is one wish, not two
            return
        num_signals, last_signal = num_signals + 1, loop.time()
        if server is not None and num_signals == 1:
            server.stop.set()
        elif task is not None:
            task.cancel()

    def on_hangup() -> None:
        if server is not None:
            server.reload_keys()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if settings.security.key_file:
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        async with open_server(settings, sinks, traffic) as server:
            keys = "a key is asked for" if server.keys else "no key is asked for"
            print(f"serving {server.served.names[0]} on {server.url} (Ctrl-C to stop)", flush=True)
            print(f"  context {server.served.max_model_len:,} tokens; {keys}; the page is at {server.url}/", flush=True)
            for line in engine_lines(settings.runner, settings.topology, server.rack.status()):
                print(f"  {line}", flush=True)
            await server.stop.wait()
            print(f"stopping: open answers get {settings.server.grace:g} s", flush=True)
    except asyncio.CancelledError:
        if not num_signals:
            raise
        if server is not None:
            raise KeyboardInterrupt from None
        print("stopped before it served", flush=True)
    finally:
        for sink in sinks:
            sink.close()
        for number in (signal.SIGINT, signal.SIGTERM) if num_signals else ():  # all is closed: one more changes nothing
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    return 0


def _events_file(path: str) -> JsonlFile:
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return JsonlFile(target)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written ({error.strerror}); choose another file or folder") from error


# ---------------------------------------------------------------- traces and simulate


def read_trace(options: argparse.Namespace) -> ScaledTrace:
    """The sessions named on the command line, scaled."""
    sessions = tuple(read_sessions(options.trace, options.limit or None)) if options.trace else demo_sessions()
    trace = scale_sessions(
        sessions[: options.limit or None],
        scale=options.scale,
        time_scale=options.time_scale,
        max_context=options.max_context,
        max_turns=options.max_turns,
    )
    if not trace.sessions:
        raise FileFormatError(f"{options.trace or 'trace'}: no session is left to replay; raise --max-context or --scale")
    return trace


def _spec(options: argparse.Namespace, seed: int) -> ReplaySpec:
    trace = read_trace(options)
    concurrency = min(options.concurrency, len(trace.sessions))
    if concurrency < options.concurrency and not options.serial:
        print(f"--concurrency {options.concurrency}: the trace has {concurrency} sessions, so no more can be live at once")
    flow = "one request at a time" if options.serial else f"{concurrency} session trees at a time"
    print(
        f"trace: {trace.describe()}; {flow}, tokens / {options.scale}, pauses / {options.time_scale:g}; seed {seed}", flush=True
    )
    return ReplaySpec("rack", trace, concurrency, options.time_scale, seed, options.serial)


def simulate(options: argparse.Namespace) -> int:
    if options.out:
        prepare_folder(options.out)
    settings = load_settings(options.config, options.overrides, environment=os.environ).sized()
    print_settings(settings)
    costs = read_costs(options.costs) if options.costs else ASSUMED_COSTS
    if not options.costs:
        print("step costs: assumed round numbers of a small CPU engine, not calibrated (see --costs)")
    spec = _spec(options, settings.seed)
    recording = replay_simulated(spec, settings.rack, layout_of(settings.runner), costs, link_of(settings))
    if options.export:
        write_sessions(options.export, sent_sessions(spec.trace.sessions, recording.requests))
    return _conclude(options, recording, costs)


def link_of(settings: Settings) -> LinkCost:
    """What a transfer costs in simulation: the rates the rack itself plans with."""
    return LinkCost(round(settings.rates.fetch_latency_s * 1e9), settings.rates.fetch_bytes_per_s)


def read_costs(path: str) -> dict[str, StepCost]:
    """Step costs by role from a costs.json."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, StepCost])
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise FileFormatError(f"{path}: not a costs file ({error}); a demo writes one as costs.json") from error


def _conclude(options: argparse.Namespace, recording: Recording, costs: dict[str, StepCost]) -> int:
    arm = arm_of(recording)
    print_comparison([arm])
    for text in failures_of(recording.requests):
        print(text)
    if "too_large" in arm.summary.failures:
        print(
            "prompts that no rank has room for: raise topology.prefill_blocks and topology.decode_blocks, or replay shorter "
            "sessions (--scale, --max-context)"
        )
    if options.out:
        write_run(Path(options.out), [arm], [recording], costs, options.command)
        print(f"report: {Path(options.out) / 'report.html'}")
    return arm.summary.exit_code


def write_run(
    folder: Path, arms: list[Arm], recordings: list[Recording], costs: dict[str, StepCost], title: str, subtitle: str = ""
) -> None:
    """Recordings as JSON lines, summaries as JSON, and one report, into `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for arm, recording in zip(arms, recordings, strict=True):
            name = arm.name.replace(" ", "-")
            write_recording(folder / f"{name}.jsonl", recording)
            (folder / f"{name}.summary.json").write_bytes(result_json(arm.summary))
        write_report(folder / "report.html", arms, title=f"rackserve {title}", subtitle=subtitle, costs=costs)
    except OSError as error:
        raise FileFormatError(f"{folder}: cannot be written ({error.strerror}); choose another with --out") from error


def prepare_folder(path: str) -> Path:
    """The folder for a run's results, tried before the run: it may take hours."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FileFormatError(f"{folder}: cannot be written ({error.strerror}); choose another with --out") from error
    return folder


def write_costs(folder: Path, costs: dict[str, StepCost]) -> None:
    """Step costs by role, for `rackserve simulate --costs`."""
    (folder / "costs.json").write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=2))


# ---------------------------------------------------------------- swarm


def add_swarm(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--seeds", type=at_least(1), default=100, help="run seeds 0..N-1 (default 100)")
    command.add_argument("--seed", type=int, help="run this one alone and describe it")


def swarm(options: argparse.Namespace) -> int:
    from rackserve.sim.swarm import describe, draw, run_seed

    if options.seed is not None:
        print(describe(draw(options.seed)))
        result = run_seed(options.seed)
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
        return 0
    totals = dict.fromkeys(("finished", "failed", "cancelled", "retried", "num_events"), 0)
    num_broken = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for number, (done, error) in enumerate(pool.map(_swarm_seed, range(options.seeds)), 1):
            if done is None:
                num_broken += 1
                print(error, file=sys.stderr, flush=True)
            else:
                for name in totals:
                    totals[name] += getattr(done, name)
            if number % 25 == 0:
                print(f"{number} of {options.seeds} seeds, {num_broken} broken", flush=True)
    print(
        f"{options.seeds - num_broken} of {options.seeds} seeds hold all laws; requests: {totals['finished']} finished, "
        f"{totals['cancelled']} cancelled by their clients, {totals['failed']} ended with an error after all the attempts that "
        f"faults left them, {totals['retried']} attempts retried; {totals['num_events']} events"
    )
    return InvariantError.exit_code if num_broken else 0


def _swarm_seed(seed: int) -> tuple[SwarmResult | None, str]:
    """The result of one seed, or the broken law as text."""
    from rackserve.sim.swarm import run_seed

    try:
        return run_seed(seed), ""
    except InvariantError as error:
        return None, str(error)
