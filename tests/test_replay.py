from __future__ import annotations

import msgspec
import pytest

from rackserve import replay as replay_module
from rackserve.assemble import RackConfig
from rackserve.base.costs import StepCost
from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.events import AttemptRetried, DraftsVerified
from rackserve.base.ids import Rank
from rackserve.base.keys import CacheNamespace
from rackserve.base.messages import Timeout
from rackserve.base.topology import Topology
from rackserve.bench.closed_loop import Replay
from rackserve.bench.demo import demo_sessions, demo_trace
from rackserve.bench.ideal import IdealCache
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.records import RecordedEvent, Recording, RequestRecord, RunInfo
from rackserve.bench.replayer import Replayer
from rackserve.bench.scale import ScaledTrace, scale_sessions
from rackserve.bench.serial import SerialReplay
from rackserve.digest_model import digest_layout
from rackserve.replay import (
    ASSUMED_COSTS,
    ReplaySpec,
    arm_of,
    exact_differences,
    num_gpus,
    replay_simulated,
    run_to_end,
    within,
)
from rackserve.route.placement import RouterConfig
from rackserve.sim.host import SimClock, SimHost, SimTransport
from rackserve.sim.store import LinkCost

LINK = LinkCost(2_000_000, 1e9)


@pytest.fixture(scope="module")
def trace() -> ScaledTrace:
    return scale_sessions(demo_sessions()[:2], scale=32, time_scale=100.0, max_turns=4)


def simulate(spec: ReplaySpec, **sections: object) -> Recording:
    return replay_simulated(spec, RackConfig(**sections), digest_layout(16), ASSUMED_COSTS, LINK)  # type: ignore[arg-type]


def record(name: str, prompt: int = 10, cached: int = 4, output: int = 3, error: str = "") -> RequestRecord:
    return RequestRecord(
        name, "s", 0, 0, 1, 10, 3, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output, error=error
    )


# ---------------------------------------------------------------- exactness


def test_equal_counts_agree_whatever_the_times() -> None:
    live, simulated = [record("a"), record("b", cached=0)], [record("b", cached=0), record("a")]
    assert exact_differences(live, [msgspec.structs.replace(r, sent_ns=9, ended_ns=99) for r in simulated]) == []


def test_each_way_to_disagree_is_told() -> None:
    live = [record("a"), record("b"), record("c"), record("d")]
    simulated = [record("a", cached=5), record("b", prompt=11), record("c", output=2), record("e")]
    assert exact_differences(live, simulated) == [
        "a: live 4 cached of 10, 3 output; simulated 5 cached of 10, 3 output",
        "b: live 4 cached of 10, 3 output; simulated 4 cached of 11, 3 output",
        "c: live 4 cached of 10, 3 output; simulated 4 cached of 10, 2 output",
        "d: live 4 cached of 10, 3 output; simulated not sent",
        "e: live not sent; simulated 4 cached of 10, 3 output",
    ]


def test_the_figures_of_an_arm_count_what_became_of_its_drafts() -> None:
    events = [RecordedEvent(1, "decode0", DraftsVerified(Rank("decode0"), 4, (4, 2), (2, 1)))]
    summary = arm_of(Recording(RunInfo("a", "live", 1, 1), (record("a"),), tuple(events))).summary
    assert (summary.draft_acceptance, summary.tokens_per_step_with_bonus) == ((0.5, 0.5), 1.75)


def test_two_failures_are_no_agreement() -> None:
    failed = [record("a", 0, 0, 0, error="http_503")]
    assert exact_differences(failed, failed) == ["a: live failed (http_503); simulated failed (http_503)"]


# ---------------------------------------------------------------- plans and runs


def test_a_spec_gives_a_fresh_plan_of_its_kind_each_time(trace: ScaledTrace) -> None:
    spec = ReplaySpec("x", trace, 2, 100.0)
    serial = msgspec.structs.replace(spec, serial=True)
    assert isinstance(spec.plan(), Replay) and isinstance(serial.plan(), SerialReplay)
    assert spec.plan() is not spec.plan()
    assert (spec.info("live", 3, 0, 1, spec.plan(), None).loop, spec.info("live", 3, 0, 1, spec.plan(), None).concurrency) == (
        "closed",
        2,
    )
    info = serial.info("live", 3, 0, 1, serial.plan(), None)
    assert (info.loop, info.concurrency, info.num_gpus, info.seed) == ("serial", 1, 3, 42)


def test_a_simulated_replay_is_the_same_every_time(trace: ScaledTrace) -> None:
    spec = ReplaySpec("x", trace, 2, 100.0)
    first, second = simulate(spec), simulate(spec)
    assert first == second
    assert len(first.requests) == trace.num_requests and not any(r.error for r in first.requests)
    assert all(
        r.prompt_tokens == r.planned_prompt_tokens and r.output_tokens == r.planned_output_tokens for r in first.requests
    )


def test_one_at_a_time_with_room_for_all_every_policy_hits_what_an_infinite_cache_would(trace: ScaledTrace) -> None:
    spec = ReplaySpec("x", trace, 1, 100.0, serial=True)
    topology = Topology(prefill_blocks=4_000, decode_blocks=4_000, segment_blocks=8_000)
    for policy in ("least_uncached_work", "session_affinity", "round_robin"):
        recording = simulate(spec, topology=topology, router=RouterConfig(policy=policy))
        assert [r.cached_tokens for r in recording.requests] == [r.ideal_cached_tokens for r in recording.requests], policy
    assert sum(r.cached_tokens for r in recording.requests) > 0


def test_costs_set_the_pace_and_their_error_is_carried_along(trace: ScaledTrace) -> None:
    spec = ReplaySpec("x", trace, 1, 100.0, serial=True)
    slow = {role: msgspec.structs.replace(cost, base_ns=10 * cost.base_ns) for role, cost in ASSUMED_COSTS.items()}
    config = RackConfig()
    layout = digest_layout(16)
    base = simulate(spec)
    slower = replay_simulated(spec, config, layout, slow, LINK)
    assert slower.run.ended_ns > base.run.ended_ns
    assert base.run.step_error is None
    errors = {"prefill": 0.05, "decode": 0.2}
    measured = {role: msgspec.structs.replace(cost, held_out_error=errors[role]) for role, cost in ASSUMED_COSTS.items()}
    assert replay_simulated(spec, config, layout, measured, LINK).run.step_error == 0.2


def test_costs_without_a_role_are_refused_by_name(trace: ScaledTrace) -> None:
    costs: dict[str, StepCost] = {"prefill": ASSUMED_COSTS["prefill"]}
    with pytest.raises(ConfigError, match="no entry for role decode"):
        replay_simulated(ReplaySpec("x", trace, 1, 1.0), RackConfig(), digest_layout(16), costs, LINK)


def test_all_ranks_count_as_gpus() -> None:
    topology = Topology(prefill_workers=3, prefill_ranks=2, decode_workers=2, decode_ranks=4)
    assert num_gpus(RackConfig(topology=topology)) == 14


def test_an_arm_has_rack_figures_only_if_events_were_recorded(trace: ScaledTrace) -> None:
    recording = simulate(ReplaySpec("x", trace, 1, 100.0))
    arm = arm_of(recording)
    assert arm.name == "simulated x" and arm.rack is not None and arm.summary.num_done == trace.num_requests
    assert arm_of(msgspec.structs.replace(recording, events=())).rack is None


def test_events_of_a_run_are_those_between_its_start_and_end() -> None:
    run = RunInfo("x", "live", 1, 1, started_ns=10, ended_ns=20)
    events = [RecordedEvent(at, "frontend", AttemptRetried("r", 1, "why")) for at in (9, 10, 15, 20, 21)]
    assert [event.at_ns for event in within(events, run)] == [10, 15, 20]


def test_recycled_sessions_come_back_as_new_ones_from_a_drawn_start() -> None:
    plan = ReplaySpec("x", demo_trace(time_scale=100.0), 2, 100.0, recycle=True, start_window=(0.25, 0.75)).plan()
    plan.start(0)
    sends, now, plays = plan.take_due(0), 0, set()
    assert sends and all(send.warmup for send in sends), "the first requests only warm caches"
    for _ in range(1_000):
        for send in sends:
            plays.add(send.key.play)
            plan.on_finished(send.key, now)
        now = max(now, plan.next_due or now)
        sends = plan.take_due(now)
    assert len(plays) > 1 and not plan.done, "sessions come back under new play numbers, without end"
    plan.stop(now)


def test_a_simulation_without_progress_stops_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimHost(lambda source, target: 0)
    made = Replayer(
        "client",
        SerialReplay(demo_sessions()[:1]),
        RequestMaker(CacheNamespace("m", "0", 16, "")),
        IdealCache(16),
        SimClock(host, "client"),
        SimTransport(host, "client"),
    )

    class Busy:
        def handle(self, message: object) -> None:
            SimClock(host, "frontend").call_at(host.now + 1, Timeout("again", ""))

    host.add("client", made)
    made.start()
    with pytest.raises(InvariantError, match=r"no progress at 0 s: nothing is left to happen, and 1 requests are open"):
        run_to_end(host, made)
    host.add("frontend", Busy())
    SimClock(host, "frontend").call_at(5, Timeout("again", ""))
    monkeypatch.setattr(replay_module, "MAX_EVENTS_BETWEEN_OUTPUTS", 50)
    with pytest.raises(InvariantError, match=r"50 events brought no output, and 1 requests are open"):
        run_to_end(host, made)
