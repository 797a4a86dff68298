"""Faults are a function of the seed, spare what must be reliable, and really happen."""

from __future__ import annotations

from dataclasses import replace

from rackserve.base.events import MessageDropped
from rackserve.base.messages import RankDown, RankUp, SegmentLost, TokensEmitted
from rackserve.base.units import NS_PER_MS
from rackserve.sim.faults import FaultPlan, inject
from tests.nodes.rig import CLIENT, MS, Rig, prompt


def faulty(plan: FaultPlan, seed: int = 1) -> Rig:
    """A rig under `plan` that has served eight requests; the rig's own record of messages goes on."""
    rig = Rig(topology={"prefill_workers": 2, "pool": True}, max_attempts=40)
    note = rig.host.filter
    assert note is not None
    inject(rig.rack, replace(plan, horizon_ns=60 * NS_PER_MS), seed)
    bend = rig.host.filter
    assert bend is not None
    if bend is not note:
        rig.host.filter = lambda source, target, message: (note(source, target, message), bend(source, target, message))[1]
    for number in range(8):
        rig.submit(f"r{number}", prompt(12, number), 8, at=number * 5 * MS)
    rig.rest()
    return rig


def test_a_plan_without_faults_changes_nothing() -> None:
    rig = faulty(FaultPlan())
    assert all(answer.attempts == 1 for answer in rig.client.answers.values())
    assert not rig.events_of(MessageDropped)


def test_the_same_seed_gives_the_same_faults() -> None:
    plan = FaultPlan(loss=0.05, double=0.1, late=0.3, kills=1, slow_ranks=1)
    digests = [faulty(plan, seed).host.digest() for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_messages_are_lost_but_never_those_between_client_and_control_or_of_supervision() -> None:
    rig = faulty(FaultPlan(loss=0.1, kills=1))
    lost = [event for event in rig.events_of(MessageDropped) if event.reason == "lost"]
    assert lost
    assert not {event.message for event in lost} & {RankUp.__name__, RankDown.__name__, "Place", "Placed", "Output", "Submit"}
    assert CLIENT not in {event.node for event in lost}


def test_killed_workers_come_back() -> None:
    rig = faulty(FaultPlan(kills=3))
    assert len(rig.messages_of(RankDown)) > 0
    assert len(rig.rack.workers()) == 3


def test_trays_lose_their_memory_and_join_again() -> None:
    rig = faulty(FaultPlan(segment_losses=2))
    assert len(rig.messages_of(SegmentLost)) == 2
    assert all(site.segment >= 0 for site in rig.rack.sites.values())


def test_engines_fail_and_slow_down() -> None:
    rig = faulty(FaultPlan(engine_failures=3))
    assert max(answer.attempts for answer in rig.client.answers.values()) > 1
    slow = faulty(FaultPlan(slow_ranks=3, slow_transfers=3))
    assert max(site.engine.slowdown for site in slow.rack.sites.values() if site.engine) > 1
    assert max(site.store.slowdown for site in slow.rack.sites.values() if site.store) > 1


def test_a_doubled_message_comes_twice() -> None:
    rig = faulty(FaultPlan(double=1.0))
    dropped = [event for event in rig.events_of(MessageDropped) if event.message == TokensEmitted.__name__]
    assert len(dropped) >= 8  # at least the second copy of each last one
