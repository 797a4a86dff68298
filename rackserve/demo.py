"""The demo: the same sessions on two set-ups of one small rack, live on this machine and in simulation, side by side."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from rackserve.arguments import add_settings, at_least
from rackserve.base.costs import StepCost
from rackserve.base.errors import RackserveError
from rackserve.base.kv_layout import KvLayout
from rackserve.base.topology import ROLES, Topology
from rackserve.bench.calibrate import calibrate
from rackserve.bench.demo import DEMO_SCALE, demo_trace
from rackserve.bench.records import RecordedEvent, Recording
from rackserve.bench.scale import ScaledTrace
from rackserve.commands import link_of, prepare_folder, print_settings, write_costs, write_run
from rackserve.config import ServerConfig, Settings, load_settings
from rackserve.live.recorder import Recorded
from rackserve.live.runner import RunnerSpec
from rackserve.progress import show_progress
from rackserve.replay import (
    VOCABULARY,
    ReplaySpec,
    arm_of,
    exact_differences,
    num_gpus,
    replay_live,
    replay_simulated,
    within,
)
from rackserve.report.compare import print_comparison
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.verify import TIE, Transcript, check_verifiable, compare_with_cold, open_cold

TIME_SCALE = 100.0
CONCURRENCY = 8
"""Live session trees."""


class Stage(msgspec.Struct, frozen=True):
    """A model and what it plays: settings for a small rack, how far token counts are divided, and ids to draw prompts from.

    The prefill ranks together hold about 70 % of the KV that the live sessions want, just below the knee at which pinning
    sessions to ranks begins to cost hits.
    """

    settings: Settings
    scale: int
    vocabulary: tuple[int, int]

    def trace(self) -> ScaledTrace:
        """The shipped sessions, cut to this model."""
        return demo_trace(scale=self.scale, time_scale=TIME_SCALE)


DEMO_SETTINGS = Settings(
    topology=Topology(prefill_workers=2, decode_workers=1, prefill_blocks=104, decode_blocks=384, segment_blocks=256),
    scheduler=SchedulerConfig(max_batched_tokens=256, max_sequences=16, max_steps_in_flight=1),
    runner=RunnerSpec(kind="llama", model="embedded", block_tokens=16),
    server=ServerConfig(port=0),
)
"""For the embedded model: a mean context of 609 tokens, 1,029 at most."""

GOLDEN_SETTINGS = Settings(
    topology=Topology(
        prefill_workers=2,
        decode_workers=1,
        prefill_blocks=28,
        decode_blocks=96,
        segment_blocks=64,
        rank_windows=96,
        segment_windows=64,
    ),
    scheduler=SchedulerConfig(max_batched_tokens=256, max_sequences=16, max_steps_in_flight=1, num_draft=5),
    runner=RunnerSpec(kind="deepseek_v41", model="golden", block_tokens=32),
    server=ServerConfig(port=0),
)
"""For the golden DeepSeek-V4.1 of 1,024 positions: a mean context of 304 tokens, 514 at most. A resume state takes the bytes of
five blocks, and every request leaves two."""

STAGES = {
    "embedded": Stage(DEMO_SETTINGS, DEMO_SCALE, VOCABULARY),
    "golden": Stage(GOLDEN_SETTINGS, 2 * DEMO_SCALE, (3, 500)),
}
"""By name of the model. Of the golden one's ids 0 to 2 begin, end and pad, and 500 stands for a token not yet known."""

PARALLEL = {
    "": (),
    "tp2": ("topology.prefill_tp=2", "topology.decode_tp=2"),
    "dep2": ("topology.prefill_ranks=2", "topology.decode_ranks=2"),
}
"""Ways to spread each worker over two devices, as settings. With dep2 there are twice as many caches to be pinned to."""

ARMS = {
    "a: per-rank caches, session affinity": {"topology.pool": False, "router.policy": "session_affinity"},
    "b: KV pool, least uncached work": {"topology.pool": True, "router.policy": "least_uncached_work"},
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
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
    add_settings(command)


def run_demo(options: argparse.Namespace) -> int:
    """Run the arms for each seed; see `rackserve demo --help`."""
    stage = STAGES[options.model]
    base = load_settings(None, PARALLEL[options.parallel or ""], stage.settings)
    base = load_settings(options.config, options.overrides, base).sized()
    if options.verify:
        check_verifiable(base)
    stage = msgspec.structs.replace(stage, settings=base)
    seeds = options.seed or [base.seed]
    print_settings(base)
    print(
        f"seeds: {', '.join(map(str, seeds))}; trace: {stage.trace().describe()}; "
        f"concurrency: {options.concurrency or CONCURRENCY}"
    )
    for name, changes in ARMS.items():
        print(f"arm {name}: {', '.join(f'{key} = {value}' for key, value in changes.items())}", flush=True)
    code = 0
    changed = [name for name in (options.model, options.parallel) if name and name != "embedded"]
    out = options.out or "-".join(["runs/demo", *changed])  # costs of one model are of no use to another
    for seed in seeds:
        folder = prepare_folder(f"{out}/seed-{seed}" if len(seeds) > 1 else out)
        code = max(code, _Demo(options, stage, seed, folder).run())
    return code


class _Demo:
    """One seed."""

    def __init__(self, options: argparse.Namespace, stage: Stage, seed: int, folder: Path) -> None:
        self._options = options
        self._seed = seed
        self._folder = folder
        self._stage = stage
        self._base = stage.settings
        self._arms = dict(list(ARMS.items())[1:]) if options.serial else ARMS
        self._layout: KvLayout | None = None

    def run(self) -> int:
        print(f"seed {self._seed}: prompts and the order of sessions", flush=True)
        live, transcripts = asyncio.run(self._live())
        recordings = list(live)
        costs: dict[str, StepCost] = {}
        if not self._options.live_only and self._layout is not None:
            for name, recording in zip(self._arms, live, strict=True):
                spec, settings = self._spec(name), self._settings(name)
                fitted = calibrate(recording.events)
                costs.update({f"{spec.label} {role}": cost for role, cost in fitted.items()})
                recordings.append(replay_simulated(spec, settings.rack, self._layout, fitted, link_of(settings)))
        arms = [arm_of(recording) for recording in recordings]
        about = [f"model {self._options.model}", *([f"devices {self._options.parallel}"] if self._options.parallel else [])]
        about += [f"seed {self._seed}", *self._arms]
        write_run(self._folder, arms, recordings, costs, "demo", "; ".join(about))
        write_costs(self._folder, calibrate(*(recording.events for recording in live)))
        print_comparison(arms)
        code = max(arm.summary.exit_code for arm in arms)
        if self._options.serial and not self._options.live_only:
            code = max(code, self._report_exactness(recordings))
        if self._options.verify:
            code = max(code, self._verify(transcripts))
        print(f"report: {self._folder / 'report.html'}")
        return code

    def _settings(self, name: str) -> Settings:
        changes = [f"{key}={msgspec.json.encode(value).decode()}" for key, value in self._arms[name].items()]
        return load_settings(None, changes, self._base)

    def _spec(self, name: str) -> ReplaySpec:
        settings = self._settings(name)
        topology = settings.topology
        config = {
            "model": settings.runner.model,
            "router.policy": settings.router.policy,
            "topology": " + ".join(f"{len(topology.ranks(role))} {role} ranks" for role in ROLES),
            "devices": str(topology.num_devices),
            "blocks per prefill rank": str(topology.prefill_blocks),
            "pool blocks": str(topology.segment_blocks * topology.num_segments),
            "step-time model": "fitted to every second live step of this arm, tested on the others",
        }
        if settings.runner.synthetic_acceptance:
            config["synthetic acceptance"] = f"{settings.runner.synthetic_acceptance:g} tokens a step: not the model's output"
        return ReplaySpec(
            name[:1],
            self._stage.trace().shuffled(self._seed),
            self._options.concurrency or CONCURRENCY,
            TIME_SCALE,
            self._seed,
            self._options.serial,
            vocabulary=self._stage.vocabulary,
            config=config,
        )

    async def _live(self) -> tuple[list[Recording], list[Transcript]]:
        """Replay every arm live, one after the other; SIGTERM ends it like Ctrl-C, and neither leaves anything running."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
        recordings, transcripts = [], []
        for name in self._arms:
            transcript = Transcript()
            recordings.append(await self._live_arm(name, transcript))
            transcripts.append(transcript)
        return recordings, transcripts

    async def _live_arm(self, name: str, transcript: Transcript) -> Recording:
        from rackserve.serving import open_server

        settings, spec = self._settings(name), self._spec(name)
        events: list[RecordedEvent] = []
        sent = 0

        def keep(recorded: Recorded) -> None:
            events.append(RecordedEvent(recorded.t, recorded.node, recorded.event))

        def progressed(count: int) -> None:
            nonlocal sent
            sent = count

        print(f"live {name}: starting ranks", flush=True)
        async with open_server(settings, [keep], transcript) as server:
            self._layout = server.rack.layout
            total = sum(session.num_requests for session in spec.trace.sessions)
            bar = asyncio.create_task(
                show_progress(f"live {name[:1]}", total, lambda: sent, lambda _: f"{sent} of {total} requests sent")
            )
            try:
                recording = await replay_live(
                    spec,
                    server.url,
                    server.served.names[0],
                    server.served.namespace,
                    num_gpus(settings.rack),
                    on_progress=progressed,
                )
            finally:
                bar.cancel()
                await asyncio.gather(bar, return_exceptions=True)
            await asyncio.sleep(0.3)  # the ranks' last events are on their way
        return msgspec.structs.replace(recording, events=within(events, recording.run))

    def _report_exactness(self, recordings: list[Recording]) -> int:
        half = len(recordings) // 2
        code = 0
        for live, simulated in zip(recordings[:half], recordings[half:], strict=True):
            differences = exact_differences(live.requests, simulated.requests)
            for line in differences:
                print(line)
            same = f"{len(live.requests) - len(differences)} of {len(live.requests)}"
            print(f"arm {live.run.label}, one request at a time: {same} requests have the same cached and uncached tokens live "
                  "and simulated")  # fmt: skip
            code = max(code, 1 if differences else 0)
        return code

    def _verify(self, transcripts: list[Transcript]) -> int:
        """Every answer of every arm against a cold run of one rank (law I13)."""
        spec = self._base.engine
        if self._layout is None:
            raise RackserveError("nothing was served")
        answers = [answer for transcript in transcripts for answer in transcript.answers.values()]
        room = max((answer.request.num_tokens + len(answer.tokens) for answer in answers), default=1)
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("cold rank", total=len(answers))
            with open_cold(spec, self._layout, room, self._base.topology.prefill_tp) as runner:
                differences = compare_with_cold(
                    answers, runner, spec.block_tokens, lambda done: progress.update(task, completed=done)
                )
        allowed = TIE if spec.kind == "llama" and spec.dtype == "bf16" else 0.0
        wrong = {difference.request for difference in differences if difference.gap > allowed}
        ties = {difference.request for difference in differences} - wrong
        incomplete = sum(not answer.complete for answer in answers)
        for difference in differences:
            print(f"{'WRONG' if difference.gap > allowed else 'tie'}: {difference}")
        same = len(answers) - len(wrong) - len(ties)
        print(f"{len(answers)} answers compared with a cold rank: {same} equal, {len(ties)} differ at ties, "
              f"{len(wrong)} wrong, {incomplete} incomplete")  # fmt: skip
        return 1 if wrong or incomplete else 0
