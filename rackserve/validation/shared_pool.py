"""A rack with one KV pool under sessions that go round robin, as vLLM and Mooncake published it, on the simulated rack."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from rackserve.assemble import RackConfig, RatesConfig
from rackserve.base.errors import InvariantError
from rackserve.base.keys import CacheNamespace
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.rng import Stream
from rackserve.base.topology import Role, Topology
from rackserve.base.units import NS_PER_S, to_ns
from rackserve.bench.closed_loop import Replay
from rackserve.bench.ideal import IdealCache
from rackserve.bench.metrics import percentile
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.replayer import Replayer
from rackserve.bench.session import HASH_ID_BYTES, Session, TraceRequest
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.ports import Ports
from rackserve.route.placement import RouterConfig
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.cost.linear import decode_cost
from rackserve.sim.cost.load import prefill_load
from rackserve.sim.cost.memory import budget
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.cost.tables import StepTimes
from rackserve.sim.engine import LinearTime, StepTime, TimedRunner
from rackserve.sim.fabric import link_cost
from rackserve.sim.hardware import chips, racks
from rackserve.sim.rack import SimRack
from rackserve.validation.models import kimi
from rackserve.validation.rows import Row, Trial

SOURCE = "vLLM and Mooncake, Serving agentic workloads at scale, 2026-05"
CHIP, RACK = "gb200", "gb200-nvl72"
PREFILL_CHIPS, DECODE_CHIPS = 4, 8
UNIT_GPUS, UNIT_SESSIONS = 12, 75
UNITS = (1, 3, 5)
TURNS, COMMON_TOKENS, FIRST_TOKENS, NEW_TOKENS, OUTPUT_TOKENS = 30, 20_000, 10_000, 2_048, 900
PAUSE_S = 5.2
"""The median of the recorded sessions that the synthetic ones were made from, drawn from half to three halves of it; theirs is
not published. Equal ones would keep sessions in step, and so each on its rank."""

BLOCK_TOKENS = 64
MAX_SEQUENCES = 256
MEAN_CONTEXT = 72_000
"""Positions before a turn's new ones, half way through a session: where step times are taken as lines."""

CHUNK_TOKENS = 16_384
HOST_SHARE = 0.8
LATENCY_US = 200.0
FOREVER = 1e6
CLIENT = "client"


class PoolRun(msgspec.Struct, frozen=True):
    """One run to its end: output tokens a second until nine tenths had ended, cached share of prompts, medians in seconds."""

    gpus: int
    output_per_s: float
    hit_rate: float
    ttft_p50_s: float
    e2e_p50_s: float


def twin_sessions(count: int, turns: int = TURNS) -> list[Session]:
    """Sessions that all begin with the same tokens and grow alike; outputs are part of the next prompt."""
    grown = [COMMON_TOKENS + FIRST_TOKENS + turn * (NEW_TOKENS + OUTPUT_TOKENS) for turn in range(turns)]
    blocks = [tokens // BLOCK_TOKENS for tokens in grown]
    common = range(COMMON_TOKENS // BLOCK_TOKENS)
    sessions = []
    for number in range(count):
        begin = len(common) + number * blocks[-1]
        ids = array("i", [*common, *range(begin, begin + blocks[-1] - len(common))]).tobytes()
        stream, at = Stream("twin", number), 0.0
        entries = []
        for tokens, num_blocks in zip(grown, blocks, strict=True):
            entries.append(TraceRequest(to_ns(at), to_ns(1), tokens, OUTPUT_TOKENS, ids[: HASH_ID_BYTES * num_blocks]))
            at += 1 + PAUSE_S * (0.5 + stream.unit())
        sessions.append(Session(f"twin{number:04}", BLOCK_TOKENS, tuple(entries), shared=True))
    return sessions


def model(role: Role) -> StepModel:
    """Step times of a prefill rank on 4 chips, or of decode ranks with their experts over 8."""
    chip = chips()[CHIP]
    tp, ep = (PREFILL_CHIPS, 1) if role == "prefill" else (1, DECODE_CHIPS)
    return StepModel(Setup(architecture=kimi(role), chip=chip, kernels=kernel_sets()[chip.kernels], role=role, tp=tp, ep=ep))


def pool_config(units: int, pool: bool, layout: KvLayout) -> RackConfig:
    """`units` prefill ranks and as many decode groups; trays' memory shared evenly among their workers."""
    chip, rack = chips()[CHIP], racks()[RACK]
    trays = units * UNIT_GPUS / rack.chips_per_tray.get("chips_per_tray")
    host_bytes = trays * rack.host_bytes.get("host_bytes") * HOST_SHARE / (2 * units)
    blocks = {role: int(budget(model(role).setup).left_bytes) // layout.block_bytes for role in ("prefill", "decode")}
    return RackConfig(
        topology=Topology(
            prefill_workers=units,
            decode_workers=units,
            decode_ranks=DECODE_CHIPS,
            prefill_blocks=blocks["prefill"],
            decode_blocks=blocks["decode"],
            pool=pool,
            segment_blocks=int(host_bytes) // layout.block_bytes,
        ),
        router=RouterConfig(policy="round_robin", max_index_runs=2_000_000),
        scheduler=SchedulerConfig(
            max_batched_tokens=CHUNK_TOKENS, max_sequences=MAX_SEQUENCES, max_steps_in_flight=1, carry=True
        ),
        rates=RatesConfig(
            prefill_tokens_per_s=CHUNK_TOKENS / model("prefill").seconds([prefill_load(CHUNK_TOKENS, MEAN_CONTEXT)]),
            fetch_bytes_per_s=PREFILL_CHIPS * chip.number("nic_bytes_per_s"),
            fetch_latency_s=LATENCY_US * 1e-6,
        ),
        deadlines=Deadlines(
            request=FOREVER, unavailable=FOREVER, silence=FOREVER, booking=2 * FOREVER, queue=FOREVER, handover=FOREVER,
            receive=FOREVER,
        ),
    )  # fmt: skip


def run_pool(units: int, *, pool: bool = True, turns: int = TURNS, sessions_each: int = UNIT_SESSIONS) -> PoolRun:
    """All sessions of `units` x 12 chips at once, from their first turn to their last."""
    layout = KvLayout(BLOCK_TOKENS, (KvGroup("kv", "full", int(kimi("decode").kv_bytes * BLOCK_TOKENS)),))
    step_times: dict[Role, StepTime] = {
        "prefill": StepTimes(model("prefill")).step_ns,
        "decode": LinearTime(decode_cost(model("decode"), sessions_each / DECODE_CHIPS, MEAN_CONTEXT, 1)),
    }
    link = link_cost(chips()[CHIP], "nic", LATENCY_US, PREFILL_CHIPS)
    rack = SimRack(
        pool_config(units, pool, layout), layout, lambda arena, blocks: TimedRunner(), step_times, link, backed=False
    )  # fmt: skip
    sessions = twin_sessions(units * sessions_each, turns)
    plan = Replay(sessions, len(sessions))
    maker = RequestMaker(CacheNamespace("twin", "0", BLOCK_TOKENS, layout.fingerprint()), with_tokens=False)
    replayers: list[Replayer] = []

    def make(ports: Ports) -> Replayer:
        replayers.append(Replayer(CLIENT, plan, maker, IdealCache(BLOCK_TOKENS), ports.clock, ports.transport))
        return replayers[0]

    rack.add_node(CLIENT, make)
    rack.host.run(until=0)
    replayers[0].start()
    rack.host.run(done=lambda: plan.done)
    records = replayers[0].records
    failed = [record for record in records if record.error]
    if failed:
        raise InvariantError(f"{len(failed)} requests of a published set-up failed: {failed[0].error} {failed[0].detail}")
    early = sorted(records, key=lambda record: record.ended_ns)[: max(1, len(records) * 9 // 10)]
    span = (early[-1].ended_ns - min(r.sent_ns for r in records)) / NS_PER_S
    return PoolRun(
        gpus=units * UNIT_GPUS,
        output_per_s=sum(r.output_tokens for r in early) / span,
        hit_rate=sum(r.cached_tokens for r in records) / sum(r.prompt_tokens for r in records),
        ttft_p50_s=percentile(sorted((r.first_ns - r.sent_ns) / NS_PER_S for r in records), 0.5),
        e2e_p50_s=percentile(sorted((r.ended_ns - r.sent_ns) / NS_PER_S for r in records), 0.5),
    )


def pool_trials(units: Sequence[int] = UNITS) -> list[Trial]:
    """Hit rate and throughput by size; and one unit with and without the pool, beside what other sessions gave."""
    runs = [run_pool(count) for count in units]
    without = run_pool(units[0], pool=False)
    setup = (
        f"Kimi-K2.5 NVFP4 on GB200, {UNIT_SESSIONS} sessions for each prefill rank of {PREFILL_CHIPS} chips and decode group "
        f"of {DECODE_CHIPS}; {COMMON_TOKENS:,} common and {FIRST_TOKENS:,} first tokens, {TURNS} turns of {NEW_TOKENS:,} in "
        f"and {OUTPUT_TOKENS} out, round robin; pauses of {PAUSE_S} s (mean) and passes of {CHUNK_TOKENS:,} tokens assumed; "
        "a simulation has no keys of answers, so they are computed once more as prompt"
    )
    hits = [Row(f"{run.gpus} GPUs, hit rate (published: above)", "share", 0.95, run.hit_rate) for run in runs]
    grown = [
        Row(f"{run.gpus} GPUs, throughput over {runs[0].gpus} (published: near linear)", "x", run.gpus / runs[0].gpus,
            run.output_per_s / runs[0].output_per_s)
        for run in runs[1:]
    ]  # fmt: skip
    one = runs[0]
    gains = (
        Row("hit rate without the pool", "share", 0.017, without.hit_rate),
        Row("hit rate with it", "share", 0.922, one.hit_rate),
        Row("throughput, with over without", "x", 3.8, one.output_per_s / without.output_per_s),
        Row("median TTFT, without over with", "x", 46.0, without.ttft_p50_s / one.ttft_p50_s),
        Row("median request, without over with", "x", 8.6, without.e2e_p50_s / one.e2e_p50_s),
    )
    return [
        Trial("one pool under round robin: hit rate", SOURCE, setup, tuple(hits)),
        Trial("one pool under round robin: scaling", SOURCE, setup, tuple(grown)),
        Trial("pool or none, 12 GPUs (theirs: recorded Codex sessions)", SOURCE, setup, gains),
    ]
