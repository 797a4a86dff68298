"""What a simulated run sent, replayed as a trace, comes out the same to the last digit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rackserve.assemble import RackConfig
from rackserve.base.keys import CacheNamespace
from rackserve.base.topology import Topology
from rackserve.base.units import to_ns
from rackserve.bench.closed_loop import Replay
from rackserve.bench.export import sent_sessions
from rackserve.bench.ideal import IdealCache
from rackserve.bench.native import write_sessions
from rackserve.bench.plan import IdleCaps
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.records import RequestRecord
from rackserve.bench.replayer import Replayer
from rackserve.bench.scale import ScaledTrace, scale_sessions
from rackserve.bench.session import Session, Subagent
from rackserve.bench.streams import streams_of
from rackserve.bench.synth import Recipe, Spread, synthesize
from rackserve.bench.trace import read_sessions
from rackserve.digest_model import digest_layout
from rackserve.nodes.ports import Ports
from rackserve.replay import ASSUMED_COSTS, ReplaySpec, replay_simulated
from rackserve.sim.engine import TimedRunner
from rackserve.sim.rack import SimRack
from rackserve.sim.store import LinkCost
from tests.bench.toys import drive, request, session

AGENTS = Recipe(
    turns=Spread(10, 0.4, 20),
    fresh_tokens=Spread(700, 0.2),
    resumed_share=0,
    new_tokens=Spread(128, 0.6, 400),
    break_tokens=Spread(300, 0.3),
    compact_share=0,
    most_tokens=4_000,
    output=Spread(20, 0.4, 40),
    gap_s=Spread(1, 0.8, 5),
    long_gap_share=0,
    subagent_share=0.7,
    groups=Spread(1, 0.5, 3),
    group_requests=Spread(4, 0.3),
    child_shared_tokens=256,
    child_tokens=Spread(200, 0.5, 400),
    child_new_tokens=Spread(100, 0.5, 200),
    child_output=Spread(10, 0.5, 20),
)
LINK = LinkCost(2_000_000, 1e9)
SMALL = RackConfig(topology=Topology(prefill_workers=2, prefill_blocks=200, decode_blocks=160, segment_blocks=64))


@pytest.fixture(scope="module")
def trace() -> ScaledTrace:
    made = scale_sessions(synthesize(15, 42, AGENTS), scale=4)
    assert made.num_requests >= 200 and any(isinstance(entry, Subagent) for s in made.sessions for entry in s.entries)
    return made


def replayed(spec: ReplaySpec) -> tuple[RequestRecord, ...]:
    return replay_simulated(spec, SMALL, digest_layout(16), ASSUMED_COSTS, LINK).requests


def exported(path: Path, sessions: tuple[Session, ...], records: tuple[RequestRecord, ...]) -> ScaledTrace:
    write_sessions(path, sent_sessions(sessions, records))
    return scale_sessions(read_sessions(path))


@pytest.mark.parametrize("rate", [0.1, 0.5, 5.0])
def test_an_open_loop_at_any_rate_replays_to_the_same_times(rate: float, trace: ScaledTrace, tmp_path: Path) -> None:
    first = replayed(ReplaySpec("x", trace, 0, 1.0, open_loop=True, rate=rate))
    again = replayed(ReplaySpec("x", exported(tmp_path / "t", trace.sessions, first), 0, 1.0, open_loop=True))
    assert len(first) == trace.num_requests == sum(not record.error for record in first)
    assert again == first


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_a_closed_loop_with_agents_and_joins_replays_to_the_same_times(
    concurrency: int, trace: ScaledTrace, tmp_path: Path
) -> None:
    first = replayed(ReplaySpec("x", trace, concurrency, 1.0))
    again = replayed(ReplaySpec("x", exported(tmp_path / "t.gz", trace.sessions, first), concurrency, 1.0))
    assert again == first


def test_sessions_that_begin_at_once_keep_their_order_whatever_their_names(trace: ScaledTrace, tmp_path: Path) -> None:
    count = len(trace.sessions)
    named = [msgspec.structs.replace(session, id=f"{count - number:03d}") for number, session in enumerate(trace.sessions)]
    backwards = scale_sessions(named)
    first = replayed(ReplaySpec("x", backwards, 4, 1.0))
    again = replayed(ReplaySpec("x", exported(tmp_path / "t", backwards.sessions, first), 4, 1.0))
    assert again == first


def cut_short(sessions: tuple[Session, ...], at_s: float) -> tuple[RequestRecord, ...]:
    """A closed loop whose client hangs up on everything at `at_s`."""
    layout = digest_layout(16)
    times = {role: lambda step, cost=cost: round(cost.base_ns) for role, cost in ASSUMED_COSTS.items()}
    rack = SimRack(SMALL, layout, lambda arena, blocks: TimedRunner(), times, LINK, backed=False)  # type: ignore[arg-type]
    maker = RequestMaker(CacheNamespace("m", "0", 16, ""), vocabulary=(0, 99))
    plan = Replay(sessions, 4, caps=IdleCaps(to_ns(1e6), to_ns(1e6)))
    made: list[Replayer] = []

    def make(ports: Ports) -> Replayer:
        made.append(Replayer("client", plan, maker, IdealCache(16), ports.clock, ports.transport))
        return made[0]

    rack.add_node("client", make)
    rack.host.run(until=0)
    made[0].start()
    rack.host.run(until=to_ns(at_s))
    made[0].stop()
    rack.host.run()
    return tuple(made[0].records)


def test_a_run_whose_client_hung_up_replays_to_the_same_times_and_none_is_lost(trace: ScaledTrace, tmp_path: Path) -> None:
    first = cut_short(trace.sessions, 15.0)
    unfinished = [record for record in first if record.error == "unfinished"]
    done = [record for record in first if not record.error]
    assert unfinished and done and len(first) == len(unfinished) + len(done) < trace.num_requests
    assert cut_short(exported(tmp_path / "t", trace.sessions, first).sessions, 15.0) == first


def test_what_was_not_sent_is_left_out_and_a_repeated_play_has_a_name_of_its_own() -> None:
    sub = Subagent("x", to_ns(4), to_ns(20), (request(0), request(3)))
    tree = session("a/b", request(1), sub, request(30))
    plan = Replay([tree], 1, recycle=True)
    times = drive(plan, lambda send: 2.0, until_s=100)
    records = [RequestRecord(name, "s", to_ns(sent), to_ns(sent), to_ns(ended), 4, 4) for name, (sent, ended) in times.items()]
    whole = sent_sessions([tree], records)
    assert [each.id for each in whole] == ["a/b", *(f"a/b+{play}" for play in range(1, len(whole)))]
    assert [each.start_ns for each in whole] == sorted(each.start_ns for each in whole)
    assert [stream.starts_ns for stream in streams_of(whole[1])] == [stream.starts_ns for stream in streams_of(whole[0])]
    [part] = sent_sessions([tree], [record for record in records if record.id in ("a/b/0/0/0", "a/b/0/1/0")])
    assert [len(stream.turns) for stream in streams_of(part)] == [1, 1]
    assert sent_sessions([tree], []) == []
