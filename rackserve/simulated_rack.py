"""A rack of a DeepSeek-V4.1 model on modelled hardware, under agent sessions: production nodes, simulated steps and links."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

import msgspec

from rackserve.architectures import FLASH, architecture_named
from rackserve.assemble import RackConfig, RatesConfig
from rackserve.base.errors import ConfigError
from rackserve.base.events import Event, QueueChanged, StepDone
from rackserve.base.ids import NodeId
from rackserve.base.keys import CacheNamespace, Chain
from rackserve.base.kv_layout import KvLayout
from rackserve.base.topology import Role, Topology
from rackserve.base.units import NS_PER_S, Time, to_ns
from rackserve.bench.closed_loop import Replay
from rackserve.bench.ideal import IdealCache
from rackserve.bench.idle import idle_while_others_queue
from rackserve.bench.metrics import percentile, tpot_ms
from rackserve.bench.midway import Midway
from rackserve.bench.occupancy import busy_share, mean_batch, mean_waiting
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.records import RecordedEvent, RequestRecord
from rackserve.bench.replayer import Replayer
from rackserve.bench.session import Session
from rackserve.model import deepseek_v41
from rackserve.model.deepseek_v41.config import read_config
from rackserve.model.deepseek_v41.layout import kv_layout
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.ports import Ports
from rackserve.route.placement import RouterConfig
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.cost.linear import decode_cost, decode_plane, plane_error
from rackserve.sim.cost.load import StepLoad
from rackserve.sim.cost.memory import budget
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.cost.tables import StepTimes
from rackserve.sim.engine import GroupTime, LinearTime, PassTime, TimedRunner
from rackserve.sim.fabric import link_cost
from rackserve.sim.hardware import Chip, chips, named, racks
from rackserve.sim.rack import SimRack

CLIENT: NodeId = "client"
BLOCK_TOKENS = 256
DRAFTS = 5
MEAN_CONTEXT = 212_000
"""Positions before a chunk or a decoded token at which step times are taken as lines: the published workload's mean."""

HOST_SHARE = 0.8
"""Share of a tray's host memory that the pool may use."""

LINK_LATENCY_US = 200.0
START_WINDOW = (0.25, 0.75)
ANSWER_S = (0.5, 1 / 387)
"""Seconds to the first token and for each token of an answer before a rack joins a replay."""

FACTORS = ("prefill_time", "decode_time", "link_bandwidth", "memory_bandwidth", "cache_size")
QUEUE_PARTS = 10
"""Parts of the window for each of which the mean number of waiting prompts is kept."""
MAX_SEQUENCES = 256
RACK_OF = {"vr": "vr-nvl72", "gb300": "gb300-nvl72"}


class SimulatedSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A rack, or the part of one that is simulated, and the load on it.

    prefill_groups, prefill_ranks   groups in lockstep and their ranks (2: DEP2)
    decode_ranks, decode_width      simulated ranks of one decode group, and how many it has: the others are taken to be alike
    pool                            trays' host memory as one pool; else every rank has its own cache alone
    rank_cache_bytes                a prefill rank's own cache, for example in host memory; 0: what its chip's memory leaves
    prefill_tokens                  most tokens of a rank's step
    accepted                        tokens that a decode step yields on average
    batch                           sequences of a decode rank around which its step time is taken as a line
    drafts                          drafts that a decode step verifies for each sequence; 0: no speculation, one token a step
    warmup_requests                 requests of each session tree, besides one of each conversation, that warm caches
    joined_s                        seconds of the replay that are over when the rack joins it, each request so far having taken
                                    `ANSWER_S`; 0: the rack is there from the beginning, and warms up itself
    settle_s, window_s              seconds after warming up or joining that are left out, and seconds measured after those
    prefill_time ... cache_size     factors on what the cost model gives: step times of either role, bandwidth of all links, of
                                    the chips' memory, and room of prefill ranks' caches and of the pool
    """

    chip: str
    prefill_groups: int
    concurrency: int
    decode_ranks: int
    decode_width: int
    prefill_ranks: int = 2
    pool: bool = True
    rank_cache_bytes: float = 0.0
    policy: str = "least_uncached_work"
    prefill_tokens: int = 32_768
    accepted: float = 3.51
    drafts: int = DRAFTS
    batch: float = 16.0
    settle_s: float = 60.0
    window_s: float = 120.0
    seed: int = 42
    prefill_time: float = 1.0
    decode_time: float = 1.0
    link_bandwidth: float = 1.0
    memory_bandwidth: float = 1.0
    cache_size: float = 1.0
    warmup_requests: int = 0
    joined_s: float = 0.0

    def __post_init__(self) -> None:
        if self.chip not in RACK_OF:
            raise ConfigError(f"chip {self.chip[:40]!r} has no rack; choose one of {', '.join(RACK_OF)}")
        if self.settle_s < 0 or self.joined_s < 0 or not self.window_s > 0:
            raise ConfigError(
                f"settle_s and joined_s must be at least 0 and window_s above 0, got {self.settle_s}, {self.joined_s} and "
                f"{self.window_s}"
            )
        if not 1 <= self.decode_ranks <= self.decode_width:
            raise ConfigError(f"decode_ranks must be from 1 to decode_width {self.decode_width}, got {self.decode_ranks}")
        for name in ("prefill_groups", "prefill_ranks", "concurrency", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in FACTORS:
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name} is a factor and must be above 0, got {getattr(self, name)}")
        if not 1 <= self.accepted <= 1 + self.drafts:
            raise ConfigError(
                f"accepted is {self.accepted:g}, but a step with {self.drafts} drafts yields from 1 to {1 + self.drafts} "
                "tokens; change accepted or drafts"
            )

    @property
    def hardware(self) -> Chip:
        """The chip, its bandwidths times their factors."""
        links = dict.fromkeys(("link_bytes_per_s", "nic_bytes_per_s", "host_link_bytes_per_s"), self.link_bandwidth)
        return chips()[self.chip].scaled(links | {"memory_bytes_per_s": self.memory_bandwidth})

    @property
    def whole_decode(self) -> bool:
        """Whether all ranks of the decode group are simulated: then each step is priced as a whole, not by a line."""
        return self.decode_ranks == self.decode_width

    @property
    def num_gpus(self) -> int:
        """Chips that are simulated: the divisor of figures per GPU."""
        return self.prefill_groups * self.prefill_ranks + self.decode_ranks

    def model(self, role: Role) -> StepModel:
        """Step times of a role's group."""
        chip = self.hardware
        kernels = named("kernels", kernel_sets(), chip.kernels)
        width, factor = (self.prefill_ranks, self.prefill_time) if role == "prefill" else (self.decode_width, self.decode_time)
        return StepModel(
            Setup(architecture=architecture_named(FLASH), chip=chip, kernels=kernels, role=role, ep=width, time_factor=factor)
        )


class SimulatedFigures(msgspec.Struct, frozen=True):
    """What was measured in the window. Latencies in seconds, rates per second; None where nothing happened.

    hit_rate, tokens_per_request   cached share of prompts, and prompt and output tokens, of requests that ended in the window
    idle_share                     time in which a prefill group ran no step while another had requests queued, over all time
    prefill_busy, decode_busy      shares of time with a step that was no dummy, mean over groups
    interactivity_p90              1 / p90 of time per output token
    line_error                     largest error of decode step times taken as a line, from a quarter to four times `batch`; 0
                                   where they are not, the whole group being simulated
    num_sessions                   session trees that drained in the window
    decode_batch                   sequences in a decode rank's step, mean over time
    """

    num_requests: int
    num_failed: int
    requests_per_s: float
    hit_rate: float | None
    tokens_per_request: float
    uncached_per_request: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    interactivity_p90: float | None
    total_per_gpu: float
    idle_share: float
    prefill_busy: float
    decode_busy: float
    line_error: float
    num_sessions: int = 0
    decode_batch: float = 0.0


class RackRun(msgspec.Struct, frozen=True):
    """One replay: its figures, and what intervals and labels are made of.

    records   requests that ended in the window (or, of those still running, got their first token in it)
    begin_ns, end_ns   the window
    queued    mean number of prompts that waited for their first step, in each of `QUEUE_PARTS` equal parts of the window
    """

    figures: SimulatedFigures
    records: tuple[RequestRecord, ...]
    begin_ns: Time
    end_ns: Time
    queued: tuple[float, ...]


class _Unasked(IdealCache):
    """Remembers nothing: what an infinite cache would have hit is not asked for, and would take the most memory."""

    def add_prompt(self, chain: Chain, num_tokens: int) -> int:
        return 0

    def add_trace_blocks(self, tree: str, hash_ids: bytes) -> int:
        return 0


def flash_layout() -> KvLayout:
    """KV of the released model, early positions of a prompt passing the first half of its layers alone."""
    path = Path(deepseek_v41.__file__).with_name("flash.json")
    return kv_layout(read_config(path), BLOCK_TOKENS, "decoder_replay")


def rack_config(setup: SimulatedSetup, layout: KvLayout) -> RackConfig:
    """The rack's configuration: caches as large as the chips' memory and the trays' host memory leave room for."""
    chip, rack = setup.hardware, racks()[RACK_OF[setup.chip]]
    host_bytes = (
        rack.host_bytes.get("host_bytes")
        / rack.chips_per_tray.get("chips_per_tray")
        * (setup.prefill_ranks * HOST_SHARE * setup.cache_size)
    )
    blocks = {
        role: int(budget(setup.model(role).setup).left_bytes - MAX_SEQUENCES * layout.window_bytes) // layout.block_bytes
        for role in ("prefill", "decode")
    }
    own = int((int(setup.rank_cache_bytes) // layout.block_bytes or blocks["prefill"]) * setup.cache_size)
    forever = 1e6
    return RackConfig(
        topology=Topology(
            prefill_workers=setup.prefill_groups,
            prefill_ranks=setup.prefill_ranks,
            decode_workers=1,
            decode_ranks=setup.decode_ranks,
            prefill_blocks=own,
            decode_blocks=blocks["decode"],
            pool=setup.pool,
            segment_blocks=int(host_bytes) // layout.block_bytes,
            rank_windows=2 * MAX_SEQUENCES,
        ),
        router=RouterConfig(policy=setup.policy, max_index_runs=2_000_000),
        scheduler=SchedulerConfig(
            max_batched_tokens=setup.prefill_tokens,
            max_sequences=MAX_SEQUENCES,
            max_steps_in_flight=1,
            num_draft=setup.drafts,
            carry=True,
        ),
        rates=RatesConfig(
            prefill_tokens_per_s=prefill_rate(setup),
            fetch_bytes_per_s=chip.number("nic_bytes_per_s"),
            fetch_latency_s=LINK_LATENCY_US * 1e-6,
        ),
        deadlines=Deadlines(
            request=forever, unavailable=forever, silence=forever, booking=2 * forever, queue=forever, handover=forever,
            receive=forever,
        ),
    )  # fmt: skip


def prefill_rate(setup: SimulatedSetup) -> float:
    """Uncached tokens a second of a prefill rank whose steps are full of the published workload's requests."""
    tokens = setup.prefill_tokens
    requests = tokens / 7_700
    load = StepLoad(requests, tokens, 128 * requests, requests * MEAN_CONTEXT, tokens * (MEAN_CONTEXT + 4_000))
    return tokens / setup.model("prefill").seconds([load])


def replay_plan(setup: SimulatedSetup, sessions: Sequence[Session]) -> Replay | Midway:
    """The replay by the published benchmark's rules: from the beginning, or joined later."""
    replay = Replay(
        sessions,
        setup.concurrency,
        recycle=True,
        start_window=START_WINDOW,
        warmup_requests=setup.warmup_requests,
        seed=setup.seed,
    )
    if not setup.joined_s:
        return replay
    first, each = ANSWER_S
    return Midway(replay, to_ns(setup.joined_s), lambda send: to_ns(first + each * send.request.output_tokens))


def simulate_rack(setup: SimulatedSetup, sessions: Sequence[Session]) -> SimulatedFigures:
    """The figures of `run_rack`."""
    return run_rack(setup, sessions).figures


def run_rack(setup: SimulatedSetup, sessions: Sequence[Session]) -> RackRun:
    """Replay `sessions` by the published benchmark's rules: a drawn start, caches warmed, then measured for a while."""
    layout = flash_layout()
    decode = setup.model("decode")
    line = LinearTime(decode_cost(decode, setup.batch, MEAN_CONTEXT, 1 + setup.drafts))
    step_times: dict[Role, PassTime] = {
        "prefill": GroupTime(StepTimes(setup.model("prefill")).group_ns),
        "decode": GroupTime(StepTimes(decode).group_ns) if setup.whole_decode else line,
    }
    link = link_cost(setup.hardware, "nic", LINK_LATENCY_US)
    config = rack_config(setup, layout)
    rack = SimRack(
        config, layout, lambda arena, blocks: TimedRunner(setup.accepted), step_times, link, backed=False
    )  # fmt: skip
    plan = replay_plan(setup, sessions)
    namespace = CacheNamespace("simulated", "0", layout.block_tokens, layout.fingerprint())
    maker = RequestMaker(namespace, seed=setup.seed, with_tokens=False)
    replayers: list[Replayer] = []

    def make(ports: Ports) -> Replayer:
        replayers.append(Replayer(CLIENT, plan, maker, _Unasked(layout.block_tokens), ports.clock, ports.transport))
        return replayers[0]

    rack.add_node(CLIENT, make)
    rack.host.run(until=0)
    replayers[0].start()
    rack.host.run(done=lambda: plan.measured_from_ns is not None or plan.done)
    if plan.measured_from_ns is None:
        failed = next((r for r in replayers[0].records if r.error), None)
        why = plan.aborted or "all sessions ended"
        if failed is not None:
            why += f" ({failed.error}: {failed.detail})"
        raise ConfigError(f"the rack never got warm: {why}; choose larger caches or fewer sessions at once")
    begin = plan.measured_from_ns + to_ns(setup.settle_s)
    end = begin + to_ns(setup.window_s)
    rack.host.run(until=begin)
    events: list[RecordedEvent] = []

    def keep(at: Time, node: NodeId, event: Event) -> None:
        if isinstance(event, QueueChanged | StepDone):
            events.append(RecordedEvent(at, node, event))

    rack.host.sinks.append(keep)
    rack.host.run(until=end)
    replayers[0].stop()
    measured = tuple(
        record for record in replayers[0].records if not record.warmup and max(record.first_ns, record.ended_ns) > begin
    )
    ended = sum(begin < at <= end for at in plan.sessions_ended_ns)
    return RackRun(
        figures=_figures(setup, config.topology, measured, ended, events, begin, end),
        records=measured,
        begin_ns=begin,
        end_ns=end,
        queued=mean_waiting(events, config.topology.workers("prefill"), begin, end, QUEUE_PARTS),
    )


def _figures(
    setup: SimulatedSetup,
    topology: Topology,
    measured: Sequence[RequestRecord],
    num_sessions: int,
    events: Sequence[RecordedEvent],
    begin: Time,
    end: Time,
) -> SimulatedFigures:
    done = [record for record in measured if not record.error and begin < record.ended_ns <= end]
    failed = [r for r in measured if r.error not in ("", "unfinished")]
    ttfts = sorted((r.first_ns - r.sent_ns) / NS_PER_S for r in measured if begin < r.first_ns <= end)
    gaps = sorted(gap for record in done if (gap := tpot_ms(record)) is not None)
    prompt, cached = sum(record.prompt_tokens for record in done), sum(record.cached_tokens for record in done)
    tokens = prompt + sum(record.output_tokens for record in done)
    seconds, count = (end - begin) / NS_PER_S, max(1, len(done))
    workers = topology.workers("prefill")
    idle = idle_while_others_queue(events, workers)
    decode = setup.model("decode")
    plane = decode_plane(decode, setup.batch, MEAN_CONTEXT, 1 + setup.drafts)
    points = [(max(1.0, setup.batch * times), MEAN_CONTEXT) for times in (0.25, 1, 4)]
    return SimulatedFigures(
        num_requests=len(done),
        num_failed=len(failed),
        requests_per_s=len(done) / seconds,
        hit_rate=cached / prompt if prompt else None,
        tokens_per_request=tokens / count,
        uncached_per_request=(prompt - cached) / count,
        ttft_p50_s=percentile(ttfts, 0.5) if ttfts else None,
        ttft_p90_s=percentile(ttfts, 0.9) if ttfts else None,
        interactivity_p90=1_000 / percentile(gaps, 0.9) if gaps else None,
        total_per_gpu=tokens / seconds / setup.num_gpus,
        idle_share=sum(idle.values()) / ((end - begin) * len(workers)),
        prefill_busy=busy_share(events, workers, begin, end),
        decode_busy=busy_share(events, topology.workers("decode"), begin, end),
        line_error=0.0 if setup.whole_decode else plane_error(decode, plane, 1 + setup.drafts, points),
        num_sessions=num_sessions,
        decode_batch=mean_batch(events, topology.workers("decode")),
    )
