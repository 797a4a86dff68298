"""How fast is the simulator beside NVIDIA Dynamo's offline replay, on the same trace and racks of the same shape?

The peer (PyPI: ai-dynamo, ai-dynamo-runtime) needs an environment of its own: give its Python as --dynamo VENV/bin/python.
--mooncake FILE is a trace of requests with block hashes, --trace FILE agent sessions in Weka's form, a session a line. Either
may be left out. Both simulate prefill and decode workers without a pool; times of a step differ, as each has a cost model of
its own, so what can be compared is the speed, and the hit rate as a check that both have simulated the same.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

import msgspec
from measure import CPU_TIME, Claim, Figure, Options, Result, figure, interleave, main

from rackserve.assemble import RackConfig, RatesConfig
from rackserve.base.costs import StepCost
from rackserve.base.keys import CacheNamespace
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.topology import Topology
from rackserve.base.units import MIB
from rackserve.bench.closed_loop import Replay
from rackserve.bench.ideal import IdealCache
from rackserve.bench.open_loop import OpenLoop
from rackserve.bench.plan import Plan
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.replayer import Replayer
from rackserve.bench.session import Session
from rackserve.bench.trace import read_sessions
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.ports import Ports
from rackserve.route.placement import RouterConfig
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.engine import LinearTime, TimedRunner
from rackserve.sim.rack import SimRack
from rackserve.sim.store import LinkCost

PEER = """
import json, sys, time
from dynamo._core import run_mocker_trace_replay
given = json.loads(sys.argv[1])
start = time.process_time()
summary = run_mocker_trace_replay(**given).summary
spent = time.process_time() - start
print("\\n" + json.dumps([spent, summary["completed_requests"], summary["prefix_cache_reused_ratio"]]))
"""
POLICIES = {"least_uncached_work": "kv_router", "round_robin": "round_robin"}
"""Our policies, and the peer's that does the like."""

COSTS = {"prefill": StepCost(8e6, 2.5e4, 0.01, 1e5, 0.0), "decode": StepCost(5e6, 0.0, 0.0, 6e4, 0.3)}
ROUNDS = 3
NEEDED = "the Python of an environment with ai-dynamo and ai-dynamo-runtime (--dynamo), and --mooncake or --trace"


class Case(msgspec.Struct, frozen=True):
    """A trace on so many prefill and as many decode workers. `lanes`: sessions at once, 0: requests at their recorded times."""

    name: str
    trace: str
    workers: int
    block: int
    blocks: int
    lanes: int = 0


class Found(msgspec.Struct, frozen=True):
    """What one run says: requests a CPU second, how many, and the cached share of their prompts."""

    rate: float
    num_requests: int
    hit_rate: float


def ours(case: Case, sessions: list[Session], policy: str) -> Found:
    """One run of this project's simulator."""
    layout = KvLayout(case.block, (KvGroup("kv", "full", 900 * case.block),))
    topology = Topology(case.workers, case.workers, prefill_blocks=case.blocks, decode_blocks=case.blocks, pool=False)
    config = RackConfig(
        topology=topology,
        router=RouterConfig(policy=policy, max_index_runs=2_000_000),
        scheduler=SchedulerConfig(max_batched_tokens=8_192, max_sequences=256, max_steps_in_flight=1, carry=True),
        rates=RatesConfig(40_000.0, 2e10, 1e-4),
        deadlines=Deadlines(request=1e6, unavailable=1e6, silence=1e6, booking=2e6, queue=1e6, handover=1e6, receive=1e6),
    )
    start = process_time()
    times = {role: LinearTime(cost) for role, cost in COSTS.items()}
    rack = SimRack(config, layout, lambda arena, size: TimedRunner(), times, LinkCost(20_000, 2e10), backed=False)  # type: ignore[arg-type]
    rack.host.keeps_digest = False
    plan: Plan = Replay(sessions, case.lanes) if case.lanes else OpenLoop(sessions)
    maker = RequestMaker(CacheNamespace("simulated", "0", case.block, layout.fingerprint()), with_tokens=False)
    clients: list[Replayer] = []

    def make(ports: Ports) -> Replayer:
        clients.append(Replayer("client", plan, maker, IdealCache(case.block), ports.clock, ports.transport))
        return clients[0]

    rack.add_node("client", make)
    rack.host.run(until=0)
    clients[0].start()
    rack.host.run(done=lambda: plan.done)
    spent = process_time() - start
    done = clients[0].records
    assert not any(record.error for record in done), "requests failed in simulation"
    cached, prompt = sum(record.cached_tokens for record in done), sum(record.prompt_tokens for record in done)
    return Found(len(done) / spent, len(done), cached / prompt)


def theirs(case: Case, python: str, router: str) -> Found:
    """One run of the peer, in a process of its own; what counts is the replay's own CPU time."""
    engine = {"backend": "vllm", "num_gpu_blocks": case.blocks, "block_size": case.block, "max_num_batched_tokens": 8_192}
    given: dict[str, object] = {
        f"{role}_engine_args": {"engine": engine | {"max_num_seqs": 256, "worker_type": role}} for role in ("prefill", "decode")
    }
    given |= {f"num_{role}_workers": case.workers for role in ("prefill", "decode")}
    given |= {"trace_files": [case.trace], "router_mode": router, "trace_block_size": case.block}
    if case.lanes:
        with open(case.trace) as lines:
            model = json.loads(next(lines))["models"][0]
        given |= {"trace_format": "weka", "agentic_lanes": case.lanes, "execution_model": model}
    environment = os.environ | {"DYN_LOG": "error"}
    command = [python, "-c", PEER, json.dumps(given)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    spent, count, hits = json.loads(done.stdout.splitlines()[-1])
    return Found(count / spent, count, hits)


def plain(path: str, folder: Path, limit: int | None) -> str:
    """The trace as the peer reads it: not compressed, and each session naming every model that its requests do."""
    opened = gzip.open if path.endswith(".gz") else open
    out = folder / "trace.jsonl"
    with opened(path, "rt") as lines, out.open("w") as into:
        for number, line in enumerate(lines):
            if number == limit:
                break
            entry = json.loads(line)
            if "requests" in entry:
                entry["models"] = sorted(set(entry.get("models", ())) | set(_models(entry["requests"])))
            into.write(json.dumps(entry, separators=(",", ":")) + "\n")
    return str(out)


def _models(requests: list[dict[str, object]]) -> Iterable[str]:
    for request in requests:
        if "model" in request:
            yield str(request["model"])
        nested = request.get("requests", [])
        assert isinstance(nested, list)
        yield from _models(nested)


def compare(case: Case, python: str, rounds: int) -> tuple[list[Figure], list[str], list[float]]:
    """Figures of one case, notes, and the ratios of each policy."""
    sessions = list(read_sessions(case.trace))
    found: dict[str, list[Found]] = {}

    def noting(name: str, run: Callable[[], Found]) -> Callable[[], float]:
        def once() -> float:
            found.setdefault(name, []).append(run())
            return found[name][-1].rate

        return once

    variants: dict[str, Callable[[], float]] = {}
    for policy, router in POLICIES.items():
        variants[policy] = noting(policy, lambda policy=policy: ours(case, sessions, policy))  # type: ignore[misc]
        variants[f"Dynamo {router}"] = noting(f"Dynamo {router}", lambda router=router: theirs(case, python, router))  # type: ignore[misc]
    values = interleave(variants, rounds)
    figures: list[Figure] = []
    ratios: list[float] = []
    for policy, router in POLICIES.items():
        peer = f"Dynamo {router}"
        figures.append(figure(f"{case.name}, {policy}", "requests per CPU s", values[policy], peer, values[peer]))
        figures.append(figure(f"{case.name}, {peer}", "requests per CPU s", values[peer]))
        ratios.append(median(figures[-2].ratios))
    hits = ", ".join(f"{name} {runs[-1].hit_rate:.1%} of {runs[-1].num_requests:,} requests" for name, runs in found.items())
    return figures, [f"{case.name}: cached share of prompts: {hits}."], ratios


def run(options: Options) -> Result:
    question = "How fast is the simulator beside NVIDIA Dynamo's offline replay, on the same trace and racks of the same shape?"
    if not options.dynamo or not (options.mooncake or options.trace):
        return Result("peer_replay", question, CPU_TIME, skipped=f"not run, it needs {NEEDED}")
    figures: list[Figure] = []
    notes: list[str] = []
    ratios: list[float] = []
    rounds = 1 if options.quick else ROUNDS
    with TemporaryDirectory() as folder:
        for kind in (kind for kind in ("mooncake", "trace") if getattr(options, kind)):
            place = Path(folder) / kind
            place.mkdir()
            if kind == "mooncake":
                path = plain(options.mooncake, place, 1_000 if options.quick else None)
                case = Case("Mooncake conversation, 4 + 4 workers", path, 4, 512, 16_384)
            else:
                path = plain(options.trace, place, 8 if options.quick else 40)
                case = Case("agent sessions, 2 + 2 workers, 16 at once", path, 2, 64, 60_000, 16)
            parts = compare(case, options.dynamo, rounds)
            figures, notes, ratios = figures + parts[0], notes + parts[1], ratios + parts[2]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    figures.append(Figure("peak memory of this process", "MiB", (peak,)))
    claims = (Claim("at least as many requests per CPU second as the peer, whatever the trace and policy", min(ratios) >= 1),)
    notes.append("The peer is compiled Rust and models engine and router anew; here the nodes that serve are what is run.")
    return Result("peer_replay", question, CPU_TIME, claims, tuple(figures), tuple(notes))


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
