"""One replay of agent sessions, live over HTTP or on the simulated host: the same plan, prompts and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rackserve.assemble import RackConfig
from rackserve.base.costs import StepCost
from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.events import Event
from rackserve.base.ids import NodeId
from rackserve.base.keys import CacheNamespace
from rackserve.base.kv_layout import KvLayout
from rackserve.base.request import Request
from rackserve.base.step import Step
from rackserve.base.topology import ROLES, Role
from rackserve.base.units import NS_PER_S, Time
from rackserve.bench.client import Target, replay_over_http
from rackserve.bench.closed_loop import Replay
from rackserve.bench.ideal import IdealCache
from rackserve.bench.metrics import summarize
from rackserve.bench.open_loop import Arrival, OpenLoop
from rackserve.bench.plan import IdleCaps, Plan, Send
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.rack import summarize_rack
from rackserve.bench.records import ClientLoad, RecordedEvent, Recording, RequestRecord, RunInfo
from rackserve.bench.replayer import Replayer
from rackserve.bench.scale import ScaledTrace
from rackserve.bench.serial import SerialReplay
from rackserve.bench.tally import Tally
from rackserve.nodes.ports import Ports
from rackserve.report.compare import Arm
from rackserve.sim.engine import TimedRunner
from rackserve.sim.host import SimHost
from rackserve.sim.rack import SimRack
from rackserve.sim.store import LinkCost

CLIENT: NodeId = "client"
VOCABULARY = (1_000, 40_000)
"""Token ids prompts are drawn from: ordinary text of the embedded model, no special tokens."""

MAX_EVENTS_BETWEEN_OUTPUTS = 2_000_000
"""A simulated rack that does so much without any output to a client will go on like that for ever."""

ASSUMED_COSTS: dict[str, StepCost] = {
    "prefill": StepCost(base_ns=20e6, per_token_ns=2.5e6, per_attended_ns=0, per_sequence_ns=0, per_context_token_ns=0),
    "decode": StepCost(base_ns=40e6, per_token_ns=0, per_attended_ns=0, per_sequence_ns=4e6, per_context_token_ns=0),
}
"""Round numbers of a small CPU engine, for a simulation that was not calibrated."""


class ReplaySpec(msgspec.Struct, frozen=True):
    """What is replayed and how. `label` names the arm; `serial` keeps one request in flight over everything.

    `recycle`, `start_window` and `warmup_requests` as in `Replay`: without end, from a drawn point of each first session, and
    after so many one-token requests of each. `vocabulary`: token ids [low, high) prompts are drawn from. `open_loop`: every
    request at its recorded time, or sessions beginning at `rate` a second (0: as recorded), `arrival` as in `OpenLoop`; then
    concurrency means nothing. `salt` makes the prompts of one run differ from those of the next.
    """

    label: str
    trace: ScaledTrace
    concurrency: int
    time_scale: float
    seed: int = 42
    serial: bool = False
    recycle: bool = False
    start_window: tuple[float, float] | None = None
    vocabulary: tuple[int, int] = VOCABULARY
    config: Mapping[str, str] = {}
    warmup_requests: int = 0
    open_loop: bool = False
    rate: float = 0.0
    arrival: Arrival = "poisson"
    salt: str = ""

    @property
    def loop(self) -> str:
        """closed, serial or open."""
        return "serial" if self.serial else "open" if self.open_loop else "closed"

    def plan(self) -> Plan:
        """A fresh plan of this replay."""
        if self.serial:
            return SerialReplay(self.trace.sessions)
        if self.open_loop:
            return OpenLoop(self.trace.sessions, rate=self.rate or None, arrival=self.arrival, seed=self.seed)
        caps = IdleCaps().scaled(self.time_scale)
        return Replay(
            self.trace.sessions,
            self.concurrency,
            caps=caps,
            recycle=self.recycle,
            start_window=self.start_window,
            warmup_requests=self.warmup_requests,
            seed=self.seed,
        )

    def info(
        self,
        host: str,
        num_gpus: int,
        started: Time,
        ended: Time,
        plan: Plan,
        error: float | None,
        client: ClientLoad | None = None,
    ) -> RunInfo:
        return RunInfo(
            self.label,
            host,
            1 if self.serial else 0 if self.open_loop else self.concurrency,
            num_gpus,
            self.loop,
            self.seed,
            started,
            ended,
            plan.steady_end_ns,
            error,
            dict(self.config),
            plan.aborted,
            client,
            len(plan.sessions_ended_ns),
        )


def num_gpus(config: RackConfig) -> int:
    """All devices of a rack: the divisor of per-GPU figures."""
    return config.topology.num_devices


async def replay_live(
    spec: ReplaySpec,
    url: str,
    model: str,
    namespace: CacheNamespace,
    gpus: int,
    *,
    on_progress: Callable[[int], None] | None = None,
    tally: Tally | None = None,
    interrupt: asyncio.Event | None = None,
    **options: object,
) -> Recording:
    """Replay against a server; its rack events are the caller's to add. `options` are further fields of `Target`.

    `on_progress` is told how many requests were sent; `tally` is kept up to date. Once `interrupt` is set the run ends
    and keeps what it has done.
    """
    plan, tally = spec.plan(), tally or Tally()
    maker = _Counted(namespace, spec, on_progress)
    target = msgspec.convert({"url": url, "model": model, **options}, Target)
    started = time.monotonic_ns()
    ideal = IdealCache(namespace.block_tokens)
    records = await replay_over_http(plan, maker, ideal, target, tally=tally, interrupt=interrupt)
    info = spec.info("live", gpus, started, time.monotonic_ns(), plan, None, tally.load())
    cut = interrupt is not None and interrupt.is_set()
    return Recording(msgspec.structs.replace(info, interrupted=cut), tuple(records))


class _Counted(RequestMaker):
    """A request maker that tells how many requests it has made."""

    __slots__ = ("_count", "_on_progress")

    def __init__(self, namespace: CacheNamespace, spec: ReplaySpec, on_progress: Callable[[int], None] | None) -> None:
        super().__init__(namespace, vocabulary=spec.vocabulary, seed=spec.seed, salt=spec.salt)
        self._count = 0
        self._on_progress = on_progress

    def make(self, send: Send) -> Request:
        self._count += 1
        if self._on_progress is not None:
            self._on_progress(self._count)
        return super().make(send)


def replay_simulated(
    spec: ReplaySpec, config: RackConfig, layout: KvLayout, costs: Mapping[str, StepCost], link: LinkCost
) -> Recording:
    """Replay on a simulated rack of the same configuration. `costs` by role; their held-out error goes into the record."""
    for role in ROLES:
        if role not in costs:
            raise ConfigError(f"costs has no entry for role {role}: run a demo or bench with more steps of that role")

    def step_time(role: Role) -> Callable[[Step], Time]:
        cost = costs[role]

        def duration(step: Step) -> Time:
            if not step.num_sequences:
                return round(cost.base_ns)
            return cost.duration_ns(step.num_tokens, step.attended, step.num_sequences, step.context_tokens)

        return duration

    step_times = {role: step_time(role) for role in ROLES}
    rack = SimRack(config, layout, lambda arena, blocks: TimedRunner(), step_times, link, backed=False)
    events: list[RecordedEvent] = []

    def keep(at: Time, node: NodeId, event: Event) -> None:
        events.append(RecordedEvent(at, node, event))  # type: ignore[arg-type]

    rack.host.sinks.append(keep)
    plan = spec.plan()
    namespace = CacheNamespace("simulated", "0", layout.block_tokens, layout.fingerprint())
    maker = RequestMaker(namespace, vocabulary=spec.vocabulary, seed=spec.seed)
    replayers: list[Replayer] = []

    def make(ports: Ports) -> Replayer:
        replayers.append(Replayer(CLIENT, plan, maker, IdealCache(layout.block_tokens), ports.clock, ports.transport))
        return replayers[0]

    rack.add_node(CLIENT, make)
    rack.host.run(until=0)
    replayers[0].start()
    run_to_end(rack.host, replayers[0])
    errors = [cost.held_out_error for cost in costs.values() if cost.held_out_error is not None]
    info = spec.info("simulated", num_gpus(config), 0, rack.host.now, plan, max(errors) if len(errors) == len(costs) else None)
    return Recording(info, tuple(replayers[0].records), tuple(events))


def run_to_end(host: SimHost, replayer: Replayer) -> None:
    """Let virtual time pass until the replay is done. InvariantError if it goes round in circles, or stops, before that."""
    while not replayer.done:
        before = replayer.num_outputs
        host.run(done=lambda: replayer.done, max_events=MAX_EVENTS_BETWEEN_OUTPUTS)
        if not replayer.done and (host.is_idle or replayer.num_outputs == before):
            how = "nothing is left to happen" if host.is_idle else f"{MAX_EVENTS_BETWEEN_OUTPUTS:,} events brought no output"
            raise InvariantError(
                f"the simulation makes no progress at {host.now / NS_PER_S:g} s: {how}, and {replayer.num_open} requests are "
                "open"
            )


def arm_of(recording: Recording) -> Arm:
    """A recording with its figures, for tables and reports."""
    duration = recording.run.ended_ns - recording.run.started_ns
    return Arm(
        summarize(recording.run, recording.requests, events=recording.events),
        recording.requests,
        summarize_rack(recording.events, duration) if recording.events else None,
        recording.events,
    )


def within(events: Sequence[RecordedEvent], run: RunInfo) -> tuple[RecordedEvent, ...]:
    """The events that were recorded during the run."""
    return tuple(event for event in events if run.started_ns <= event.at_ns <= run.ended_ns)


def exact_differences(live: Sequence[RequestRecord], simulated: Sequence[RequestRecord]) -> list[str]:
    """Requests whose token counts or outcomes differ between two runs of one plan, as readable lines. Failures never agree."""

    def counts(record: RequestRecord | None) -> str:
        if record is None:
            return "not sent"
        if record.error:
            return f"failed ({record.error})"
        return f"{record.cached_tokens} cached of {record.prompt_tokens}, {record.output_tokens} output"

    ours, theirs = ({record.id: record for record in records} for records in (live, simulated))
    lines = []
    for name in dict.fromkeys((*ours, *theirs)):
        here, there = counts(ours.get(name)), counts(theirs.get(name))
        if here != there or "failed" in here:
            lines.append(f"{name}: live {here}; simulated {there}")
    return lines
