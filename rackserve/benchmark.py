"""The commands `bench`, which measures a live endpoint at one concurrency or several, and `synthesize`, which makes a trace."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx

from rackserve.base.errors import ConfigError
from rackserve.base.keys import CacheNamespace
from rackserve.bench.agents import separate_agents
from rackserve.bench.export import sent_sessions
from rackserve.bench.frontier import Curve, operating_point, write_frontier
from rackserve.bench.metrics import failures_of
from rackserve.bench.native import write_sessions
from rackserve.bench.records import Recording
from rackserve.bench.scale import ScaledTrace
from rackserve.bench.session import Session
from rackserve.bench.synth import synthesize as synthetic_sessions
from rackserve.bench.tally import Tally
from rackserve.bench.trace_stats import TraceStatistics
from rackserve.commands import prepare_folder, read_trace, write_run
from rackserve.progress import show_progress
from rackserve.replay import VOCABULARY, ReplaySpec, arm_of, replay_live
from rackserve.report.compare import Arm, print_comparison

AGENTX_SECONDS = 3_600.0
LEAST_SECONDS = 900.0
"""A shorter run is not comparable with published ones."""

INTERRUPTED = 130
"""Exit code of a run that a signal ended: what was done till then is written all the same."""


def bench(options: argparse.Namespace) -> int:
    """Measure `options.url` at each concurrency; 0 if every run is valid, INTERRUPTED if a signal ended it."""
    deviations = resolve(options)
    if options.out:
        prepare_folder(options.out)
    trace = read_trace(options)
    if options.separate_agents:
        before = trace.num_streams
        trace = trace.changed(separate_agents)
        print(f"agents: {trace.num_streams - before} found in flat lists of requests")
    for text in deviations:
        print(f"not as the published rules have it: {text}")
    salt = secrets.token_hex(4) if options.salt is None else options.salt
    arms: list[Arm] = []
    recordings: list[Recording] = []
    several = len(options.concurrency) > 1
    for concurrency in options.concurrency:
        spec = spec_of(options, trace, concurrency, f"c{concurrency}" if several else "bench", salt, deviations)
        print(f"{trace.describe()}; {describe(spec)}; seed {spec.seed}, salt {spec.salt!r}", flush=True)
        recordings.append(asyncio.run(_run(options, spec)))
        arms.append(arm_of(recordings[-1]))
        for text in (*arms[-1].summary.warnings, *failures_of(recordings[-1].requests)):
            print(f"{arms[-1].name}: {text}")
        if options.out:  # after every run, so that an interrupted sweep leaves what it has
            _write(Path(options.out), arms, recordings, several)
        if recordings[-1].run.interrupted:
            break
    if options.export:
        write_sessions(options.export, sent_sessions(trace.sessions, recordings[0].requests))
    print_comparison(arms)
    if options.out:
        print(f"report: {Path(options.out) / 'report.html'}")
    return INTERRUPTED if recordings[-1].run.interrupted else max(arm.summary.exit_code for arm in arms)


def resolve(options: argparse.Namespace) -> tuple[str, ...]:
    """Fill in what follows from other options, refuse what contradicts itself; what differs from the rules of `--agentx`."""
    rules: dict[str, object] = {}
    if options.agentx:
        rules = {"scale": 1, "time_scale": 1.0, "start_window": [0.25, 0.75], "warmup_requests": 10, "deadline": AGENTX_SECONDS}
        options.recycle = options.separate_agents = True
    plain: dict[str, object] = {"scale": 32, "time_scale": 100.0, "warmup_requests": 0, "deadline": 0.0}
    deviations = [
        f"--{name.replace('_', '-')} {getattr(options, name)} instead of {value}"
        for name, value in rules.items()
        if getattr(options, name) not in (None, value) and name != "deadline"
    ]
    for name, value in {**plain, **rules}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.agentx and options.deadline < LEAST_SECONDS:
        deviations.append(f"--deadline {options.deadline:g} is below {LEAST_SECONDS:g} seconds")
    if options.agentx and (options.max_turns or options.max_context or options.limit):
        deviations.append("sessions were left out or cut by --limit, --max-turns or --max-context")
    closed = options.recycle or options.start_window or options.warmup_requests
    if options.recycle and not options.deadline:
        raise ConfigError("--recycle never ends by itself: set --deadline SECONDS")
    if options.warmup_requests and not options.start_window:
        raise ConfigError("--warmup-requests needs --start-window LOW HIGH")
    if options.serial and closed:
        raise ConfigError("--serial replays each session once from its start: leave out --recycle and --start-window")
    if options.open_loop and (closed or options.serial or len(options.concurrency) > 1):
        raise ConfigError(
            "--open-loop sends each session once at its time: leave out --recycle, --start-window, --serial and all but one "
            "--concurrency"
        )
    if options.export and len(options.concurrency) > 1:
        raise ConfigError("--export writes one run: leave out all but one --concurrency")
    if options.rate and not options.open_loop:
        raise ConfigError("--rate needs --open-loop")
    return tuple(deviations)


def spec_of(
    options: argparse.Namespace, trace: ScaledTrace, concurrency: int, label: str, salt: str, deviations: tuple[str, ...]
) -> ReplaySpec:
    """One run of the benchmark."""
    possible = concurrency if options.recycle else min(concurrency, len(trace.sessions))
    if possible < concurrency and not options.serial and not options.open_loop:
        print(f"--concurrency {concurrency}: the trace has {possible} sessions, so no more can be live at once")
    low, high = options.vocabulary or VOCABULARY
    window = options.start_window
    salt = f"{salt}.{concurrency}"  # one run of a sweep must not hit what the one before it left in the caches
    config = {
        "url": options.url, "endpoint": options.endpoint, "trace": options.trace or "shipped", "salt": salt,
        "scale": f"{options.scale}", "time_scale": f"{options.time_scale:g}", "deadline_s": f"{options.deadline:g}",
        "start_window": f"{window or ''}", "warmup_requests": f"{options.warmup_requests}", "recycle": f"{options.recycle}",
        "separate_agents": f"{options.separate_agents}", "dp_ranks": f"{options.dp_ranks}", "deviations": "; ".join(deviations),
    }  # fmt: skip
    return ReplaySpec(
        label,
        trace,
        possible,
        options.time_scale,
        options.seed,
        options.serial,
        options.recycle,
        (window[0], window[1]) if window else None,
        (low, high),
        config,
        warmup_requests=options.warmup_requests,
        open_loop=options.open_loop,
        rate=options.rate or 0.0,
        arrival=options.arrival,
        salt=salt,
    )


def describe(spec: ReplaySpec) -> str:
    """How sessions are sent, in words."""
    if spec.serial:
        return "closed loop, one request at a time"
    if spec.open_loop:
        return f"open loop, {f'{spec.rate:g} sessions a second ({spec.arrival})' if spec.rate else 'at the recorded times'}"
    return f"closed loop, {spec.concurrency} session trees at a time"


async def _run(options: argparse.Namespace, spec: ReplaySpec) -> Recording:
    model = options.model or await _first_model(options.url, options.api_key)
    tally, interrupt = Tally(), asyncio.Event()
    total = None if spec.recycle else spec.trace.num_requests
    bar = asyncio.create_task(show_progress(spec.label, total, lambda: tally.finished + tally.failed, tally.line))
    _until_signal(interrupt)
    try:
        return await replay_live(
            spec,
            options.url,
            model,
            CacheNamespace(model, "", 16, ""),
            options.gpus,
            tally=tally,
            interrupt=interrupt,
            endpoint=options.endpoint,
            api_key=options.api_key,
            headers=dict(options.header),
            dp_ranks=options.dp_ranks,
            request_deadline_s=options.request_deadline,
            max_connections=options.max_connections,
            run_deadline_s=options.deadline,
        )
    finally:
        bar.cancel()
        await asyncio.gather(bar, return_exceptions=True)


def _until_signal(interrupt: asyncio.Event) -> None:
    """Let the first Ctrl-C (or SIGTERM) set `interrupt`; a second one has its usual effect."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        interrupt.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


async def _first_model(url: str, api_key: str) -> str:
    root = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            answer = await client.get(f"{root}/v1/models", headers=headers)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"--url {url}: {error or type(error).__name__}; is the server running?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--url {url}: /v1/models does not answer like an OpenAI server; name one with --model") from error


def _write(folder: Path, arms: list[Arm], recordings: list[Recording], several: bool) -> None:
    write_run(folder, arms, recordings, {}, "bench")
    if several:
        points = [point for arm in arms if (point := operating_point(arm.summary)) is not None]
        write_frontier(folder / "frontier.json", Curve(folder.resolve().name, tuple(points)))


def synthesize(options: argparse.Namespace) -> int:
    """Draw sessions, print their statistics beside the published ones, and write them if asked to."""
    statistics = TraceStatistics()
    sessions = synthetic_sessions(options.sessions, options.seed)

    def counted() -> Iterator[Session]:
        for session in sessions:
            statistics.add(session)
            yield session

    if options.out:
        write_sessions(options.out, counted())
    else:
        for _ in counted():
            pass
    print(f"{options.sessions} synthetic sessions, seed {options.seed}")
    print(f"{'':48} {'synthetic':>12} {'published':>12}")
    for row in statistics.rows():
        published = "" if row.published is None else f"{row.published:12,.4g}"
        print(f"{row.name:48} {row.value:12,.4g} {published}")
    if options.out:
        print(f"trace: {options.out}")
    return 0
