"""How fast the simulator runs agent sessions, beside a bare loop over its event heap."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time_ns
from typing import Any
from unittest.mock import patch

import msgspec
from measure import CPU_TIME, Figure, Options, Result, at_most, figure, interleave, main

from rackserve import replay
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.messages import Cancel, Message
from rackserve.base.units import MIB
from rackserve.bench.demo import DEMO_SCALE, demo_trace
from rackserve.bench.scale import ScaledTrace, scale_sessions
from rackserve.bench.trace import read_sessions
from rackserve.commands import link_of
from rackserve.config import Settings, load_settings
from rackserve.demo import CONCURRENCY, DEMO_SETTINGS, TIME_SCALE
from rackserve.replay import ASSUMED_COSTS, ReplaySpec, replay_simulated
from rackserve.sim.host import SimHost
from rackserve.sim.rack import SimRack

SIZES = (1, 4, 12)
"""The demo's rack and sessions, and so many times as many of both."""
TRACE_SESSIONS = 24
LAYOUT = KvLayout(16, (KvGroup("kv", "full", 368_640),))
ECHOES = 20_000


class Echo:
    """Sends back what it gets, `left` times."""

    def __init__(self, host: SimHost, name: str, peer: str, left: int) -> None:
        self._host, self._name, self._peer, self._left = host, name, peer, left

    def handle(self, message: Message) -> None:
        self._left -= 1
        if self._left >= 0:
            self._host.send(self._name, self._peer, message)


def echo(events: int) -> float:
    """Nanoseconds an event takes on the simulated host when its node does nothing."""
    host = SimHost(lambda source, target: 1)
    host.add("a", Echo(host, "a", "b", events // 2))
    host.add("b", Echo(host, "b", "a", events // 2))
    host.post("a", 0, Cancel("r", "nothing"))
    start = process_time_ns()
    host.run()
    return (process_time_ns() - start) / host.num_events


def enlarge(trace: ScaledTrace, times: int) -> ScaledTrace:
    """Every session `times` times, under different names and so with different prompts."""
    copies = [
        msgspec.structs.replace(session, id=f"{session.id}.{number}") for number in range(times) for session in trace.sessions
    ]
    return msgspec.structs.replace(trace, sessions=tuple(copies), num_requests=trace.num_requests * times)


class Run:
    """One simulation; `values` has (CPU ns, requests, events, output tokens, simulated ns) of the last one."""

    def __init__(self, trace: ScaledTrace, settings: Settings, concurrency: int, seed: int) -> None:
        self._spec = ReplaySpec("b", trace, concurrency, TIME_SCALE, seed)
        self._settings = settings
        self.requests = self.events = self.outputs = self.simulated_ns = 0
        self.peak_mib = 0.0

    def __call__(self) -> float:
        racks: list[SimRack] = []

        class Kept(SimRack):
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **named)
                racks.append(self)

        start = process_time_ns()
        with patch.object(replay, "SimRack", Kept):
            recording = replay_simulated(self._spec, self._settings.rack, LAYOUT, ASSUMED_COSTS, link_of(self._settings))
        spent = process_time_ns() - start
        failed = [record.error for record in recording.requests if record.error]
        assert not failed, f"{len(failed)} requests failed in simulation: {failed[:3]}"
        self.requests, self.events = len(recording.requests), racks[0].host.num_events
        self.outputs = sum(record.output_tokens for record in recording.requests)
        self.simulated_ns = recording.run.ended_ns - recording.run.started_ns
        self.peak_mib = self.peak_mib or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
        return spent


def enlarged(times: int) -> Settings:
    topology = DEMO_SETTINGS.topology
    return load_settings(
        None,
        [
            f"topology.prefill_workers={topology.prefill_workers * times}",
            f"topology.decode_workers={topology.decode_workers * times}",
        ],
        DEMO_SETTINGS,
    )


def runs_of(options: Options) -> dict[str, Run]:
    runs = {}
    for times in SIZES[:1] if options.quick else SIZES:
        topology = enlarged(times).topology
        name = f"{topology.prefill_workers} + {topology.decode_workers} ranks, demo sessions x {times}"
        runs[name] = Run(enlarge(demo_trace(time_scale=TIME_SCALE), times), enlarged(times), CONCURRENCY * times, options.seed)
    if options.trace:
        sessions = tuple(read_sessions(options.trace, TRACE_SESSIONS))
        trace = scale_sessions(sessions, scale=DEMO_SCALE, time_scale=TIME_SCALE, max_context=1_700)
        runs[f"8 + 4 ranks, {len(trace.sessions)} sessions of the given trace"] = Run(trace, enlarged(4), 24, options.seed)
    return runs


def run(options: Options) -> Result:
    runs = runs_of(options)
    variants: dict[str, Callable[[], float]] = {"echo": partial(echo, 500 if options.quick else ECHOES), **runs}
    ns = interleave(variants, options.rounds)
    figures = [figure("bare heap loop: one message to and fro between two nodes", "µs/event", ns["echo"], scale=1e-3)]
    for name, each in runs.items():
        figures += _of_run(name, each, ns[name], ns["echo"])
    per_event = [part for part in figures if part.unit == "µs/event" and part.ratios]
    middles = [median(part.values) for part in per_event]
    claims = (
        at_most("an event costs at most 20 events of the bare loop", [max(part.ratios) for part in per_event], 20),
        at_most("an event costs the same at every size, to a factor of 1.5", [max(middles) / min(middles)], 1.5),
    )
    notes = [f"{name}: {each.requests:,} requests, {each.events:,} events, {each.outputs:,} output tokens, "
             f"{each.simulated_ns / 1e9:,.0f} s of simulated time." for name, each in runs.items()]  # fmt: skip
    notes.append(
        "Decode is planned step by step here (rack_simulation has it in closed form), so the cost of a request grows with its "
        "output tokens. Peak memory is that of the "
        "whole process after the first run of that size, sizes in ascending order."
    )
    question = "How many requests does a second of CPU simulate, and how much of that is the event loop itself?"
    return Result("simulator", question, CPU_TIME, claims, tuple(figures), tuple(notes))


def _of_run(name: str, each: Run, ns: list[float], echo_ns: list[float]) -> list[Figure]:
    speed = tuple(each.simulated_ns / value for value in ns)
    return [
        Figure(
            name,
            "requests per CPU s",
            tuple(each.requests / value * 1e9 for value in ns),
            "simulated over CPU time (larger is faster)",
            speed,
        ),
        figure(name, "µs/event", [value / each.events for value in ns], "the bare heap loop", echo_ns, 1e-3),
        Figure(name, "events per CPU s", tuple(each.events / value * 1e9 for value in ns)),
        Figure(f"{name}: peak memory", "MiB", (each.peak_mib,)),
    ]


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
