"""How fast racks serve full-size agent sessions in simulation: decode in closed form beside the same run step by step."""

from __future__ import annotations

import cProfile
import pstats
import resource
from array import array
from collections import Counter
from pathlib import Path
from statistics import median
from time import process_time_ns

import msgspec
from measure import CPU_TIME, Claim, Figure, Options, Result, main

import rackserve
from rackserve.assemble import RackConfig, RatesConfig
from rackserve.base.costs import StepCost
from rackserve.base.keys import CacheNamespace, Chain
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.rng import Stream
from rackserve.base.topology import Topology
from rackserve.base.units import MIB, NS_PER_S
from rackserve.bench.closed_loop import Replay
from rackserve.bench.ideal import IdealCache
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.replayer import Replayer
from rackserve.bench.session import Session, TraceRequest
from rackserve.bench.trace import read_sessions
from rackserve.nodes.ports import Ports
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.checks import check_every
from rackserve.sim.engine import LinearTime, TimedRunner
from rackserve.sim.rack import SimRack
from rackserve.sim.store import LinkCost

BLOCK = 256
TRACE_BLOCK = 64
LAYOUT = KvLayout(BLOCK, (KvGroup("kv", "full", 900 * BLOCK),))
COSTS = {"prefill": StepCost(8e6, 9e3, 0.01, 1e5, 0.0), "decode": StepCost(5e6, 0.0, 0.0, 6e4, 0.3)}
"""Round numbers of the order of a large chip's: 110,000 prompt tokens/s a rank, 5 ms and more a decode step."""

EVENTS_A_CHECK = 100_000
TARGET = 10_000


class Unasked(IdealCache):
    """Remembers nothing: what an infinite cache would have hit is no part of a simulation."""

    def add_prompt(self, chain: Chain, num_tokens: int) -> int:
        return 0

    def add_trace_blocks(self, tree: str, hash_ids: bytes) -> int:
        return 0


class Shape(msgspec.Struct, frozen=True):
    """A rack, how many sessions it serves at once, and after how many requests its caches are taken to be warm."""

    name: str
    topology: Topology
    concurrency: int
    warm: int
    measured: int


PREFILL = {"prefill_ranks": 2, "prefill_blocks": 6_000, "decode_blocks": 20_000, "segment_blocks": 20_000}
SHAPES = (
    Shape("36 GPUs: 12 x DEP2 + 12 decode ranks", Topology(12, 12, **PREFILL), 100, 1_000, 2_000),
    Shape("72 GPUs: 24 x DEP2 + DEP24 decode", Topology(24, 1, decode_ranks=24, **PREFILL), 500, 1_500, 1_500),
)
SMALL = Shape("2 x DEP2 + 2 decode ranks", Topology(2, 2, **PREFILL), 10, 20, 40)


def drawn_sessions(count: int, seed: int) -> list[Session]:
    """Sessions of the size of recorded ones: prompts of 20 k to 250 k tokens that grow by some hundred or thousand a turn."""
    sessions = []
    for number in range(count):
        chance = Stream("session", seed, number)
        blocks, at_ns, turns = chance.between(300, 2_400), 0, []
        for _ in range(chance.between(20, 60)):
            blocks += chance.between(2, 18) if chance.chance(0.9) else chance.between(20, 400)
            output = 100 + chance.below(120) * chance.between(1, 7)
            api_ns = output * 10_000_000
            ids = array("i", range(min(blocks, 3_900))).tobytes()
            turns.append(TraceRequest(at_ns, api_ns, len(ids) // 4 * TRACE_BLOCK + chance.below(TRACE_BLOCK), output, ids))
            at_ns += api_ns + chance.between(1, 20) * NS_PER_S
        sessions.append(Session(f"s{number}", TRACE_BLOCK, tuple(turns)))
    return sessions


class Run:
    """One simulation after its caches are warm; the last one's counts are kept."""

    def __init__(self, shape: Shape, sessions: list[Session], *, carry: bool, share: float = 1.0) -> None:
        self._shape = shape
        self._sessions = sessions
        self._carry = carry
        self._warm, self._measured = max(1, round(shape.warm * share)), max(1, round(shape.measured * share))
        self.requests = self.events = self.simulated_ns = self.tokens = 0
        self.peak_mib = 0.0

    def __call__(self, profile: cProfile.Profile | None = None) -> float:
        """Nanoseconds of CPU time of the measured part."""
        rack, client = self._build()
        client.start()
        rack.host.run(done=lambda: len(client.records) >= self._warm)
        before, events, now = len(client.records), rack.host.num_events, rack.host.now
        start = process_time_ns()
        if profile is not None:
            profile.enable()
        rack.host.run(done=lambda: len(client.records) >= before + self._measured)
        if profile is not None:
            profile.disable()
        spent = process_time_ns() - start
        done = client.records[before:]
        assert not any(record.error for record in done), "requests failed in simulation"
        self.requests, self.events, self.simulated_ns = len(done), rack.host.num_events - events, rack.host.now - now
        self.tokens = sum(record.prompt_tokens + record.output_tokens for record in done)
        self.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
        return spent

    def _build(self) -> tuple[SimRack, Replayer]:
        scheduler = SchedulerConfig(max_batched_tokens=8_192, max_sequences=256, max_steps_in_flight=1, carry=self._carry)
        config = RackConfig(topology=self._shape.topology, scheduler=scheduler, rates=RatesConfig(110_000.0, 2e10, 1e-4))
        times = {"prefill": LinearTime(COSTS["prefill"]), "decode": LinearTime(COSTS["decode"])}
        rack = SimRack(config, LAYOUT, lambda arena, blocks: TimedRunner(), times, LinkCost(20_000, 2e10), backed=False)  # type: ignore[arg-type]
        rack.host.keeps_digest = False
        check_every(rack, EVENTS_A_CHECK)
        plan = Replay(self._sessions, self._shape.concurrency, recycle=True)
        maker = RequestMaker(CacheNamespace("simulated", "0", BLOCK, LAYOUT.fingerprint()), with_tokens=False)
        clients: list[Replayer] = []

        def make(ports: Ports) -> Replayer:
            clients.append(Replayer("client", plan, maker, Unasked(BLOCK), ports.clock, ports.transport))
            return clients[0]

        rack.add_node("client", make)
        rack.host.run(until=0)
        return rack, clients[0]


def shares(run: Run) -> str:
    """Where the time goes by package, as a profile sees it."""
    profile = cProfile.Profile()
    run(profile)
    spent: Counter[str] = Counter()
    root = str(Path(rackserve.__file__).parent)
    for (file, _, _), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        inside = file.startswith(root)
        spent[Path(file).relative_to(root).parts[0] if inside else "built in"] += own
    total = sum(spent.values())
    return ", ".join(f"{name} {part / total:.0%}" for name, part in spent.most_common(8))


def run(options: Options) -> Result:
    shapes = (SMALL,) if options.quick else SHAPES
    sessions = (
        list(read_sessions(options.trace, 200)) if options.trace else drawn_sessions(4 if options.quick else 150, options.seed)
    )
    rounds = 1 if options.quick else 2
    figures: list[Figure] = []
    notes: list[str] = []
    rates: list[float] = []
    speeds: list[float] = []
    for shape in shapes:
        carried, stepped = Run(shape, sessions, carry=True), Run(shape, sessions, carry=False, share=0.2)
        ns = [(carried(), stepped()) for _ in range(rounds)]
        fast = [carried.requests / spent * 1e9 for spent, _ in ns]
        slow = [stepped.requests / spent * 1e9 for _, spent in ns]
        speeds = [carried.simulated_ns / spent for spent, _ in ns]
        ratios = tuple(a / b for a, b in zip(fast, slow, strict=True))
        figures += [
            Figure(shape.name, "requests per CPU s", tuple(fast), "decode planned step by step", ratios),
            Figure(shape.name, "simulated s per CPU s", tuple(speeds)),
            Figure(shape.name, "events per request", (carried.events / carried.requests,)),
            Figure(f"{shape.name}, decode planned step by step", "requests per CPU s", tuple(slow)),
            Figure(f"{shape.name}, decode planned step by step", "events per request", (stepped.events / stepped.requests,)),
            Figure(f"{shape.name}: peak memory of the process", "MiB", (carried.peak_mib,)),
        ]
        rates.append(median(fast))
        notes.append(
            f"{shape.name}: {shape.concurrency} sessions at once, {carried.tokens / carried.requests:,.0f} tokens a request, "
            f"{carried.simulated_ns / 1e9:,.0f} s simulated; CPU time by package: {shares(carried)}."
        )
    notes.append(f"Laws are checked once in {EVENTS_A_CHECK:,} events here, and after every event in the swarm.")
    claims = (
        Claim(f"at least {TARGET:,} requests per CPU second on 36 GPUs", rates[0] >= TARGET),
        Claim("the largest rack runs at 20 times real time or faster", min(speeds) >= 20),
        Claim("memory stays under 4 GiB", max(part.values[0] for part in figures if part.unit == "MiB") < 4096),
    )
    question = "How many full-size agent requests does a second of CPU simulate, and what does decode in closed form give?"
    return Result("rack_simulation", question, CPU_TIME, claims, tuple(figures), tuple(notes))


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
