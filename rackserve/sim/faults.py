"""Faults of a simulated run, drawn from a seed: messages late, lost or doubled, slow and dying ranks, lost pool memory."""

from __future__ import annotations

from dataclasses import dataclass

from rackserve.base.ids import SUPERVISOR, NodeId
from rackserve.base.messages import Message, RankDown, RankUp, SegmentJoined, SegmentLost
from rackserve.base.rng import Stream
from rackserve.base.units import NS_PER_MS, Time
from rackserve.sim.rack import SimRack

RELIABLE = (RankUp, RankDown, SegmentLost, SegmentJoined)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How often messages to and from workers are lost, doubled or late, and how many times worse things happen.

    The chances are per message; `max_delay_ns` bounds a late one. Counts are events spread over `horizon_ns`.
    """

    loss: float = 0.0
    double: float = 0.0
    late: float = 0.0
    max_delay_ns: Time = 20 * NS_PER_MS
    kills: int = 0
    segment_losses: int = 0
    slow_ranks: int = 0
    engine_failures: int = 0
    slow_transfers: int = 0
    horizon_ns: Time = 2_000 * NS_PER_MS


def inject(rack: SimRack, plan: FaultPlan, seed: int) -> None:
    """Arm all faults of `plan` on `rack`, as a function of `seed`."""
    chance = Stream("faults", seed)

    def filtered(source: NodeId, target: NodeId, message: Message) -> list[Time]:
        if source == SUPERVISOR or isinstance(message, RELIABLE) or not (source in rack.sites or target in rack.sites):
            return [0]
        if chance.chance(plan.loss):
            return []
        copies = 2 if chance.chance(plan.double) else 1
        return [chance.below(plan.max_delay_ns) if chance.chance(plan.late) else 0 for _ in range(copies)]

    if plan.loss or plan.double or plan.late:
        rack.host.filter = filtered
    names = list(rack.sites)
    moments = Stream("moments", seed)

    def at_random() -> tuple[Time, NodeId]:
        return moments.below(plan.horizon_ns), names[moments.below(len(names))]

    for _ in range(plan.kills):
        when, name = at_random()
        rack.host.call(when, lambda name=name: _kill(rack, name, moments))  # type: ignore[misc]
    for _ in range(plan.segment_losses if rack.pool is not None else 0):
        when, name = at_random()
        rack.host.call(when, lambda name=name: _lose_segment(rack, name))  # type: ignore[misc]
    for _ in range(plan.slow_ranks):
        when, name = at_random()
        rack.host.call(when, lambda name=name: _slow(rack, name, moments, "engine"))  # type: ignore[misc]
    for _ in range(plan.slow_transfers):
        when, name = at_random()
        rack.host.call(when, lambda name=name: _slow(rack, name, moments, "store"))  # type: ignore[misc]
    for _ in range(plan.engine_failures):
        when, name = at_random()
        rack.host.call(when, lambda name=name: _fail_engine(rack, name))  # type: ignore[misc]


def _kill(rack: SimRack, name: NodeId, moments: Stream) -> None:
    if rack.sites[name].node is None:
        return
    noticed = moments.between(0, 50 * NS_PER_MS)
    rack.kill(name, noticed_after=noticed)
    restart = noticed + moments.between(1, 500 * NS_PER_MS)
    rack.host.call(rack.host.now + restart, lambda: rack.start(name))


def _lose_segment(rack: SimRack, name: NodeId) -> None:
    if rack.sites[name].node is not None and rack.sites[name].segment >= 0:
        rack.lose_segment(name)
        rack.join_segment(name)


def _slow(rack: SimRack, name: NodeId, moments: Stream, part: str) -> None:
    site = rack.sites[name]
    target = site.engine if part == "engine" else site.store
    if target is not None:
        target.slowdown = float(moments.between(2, 60))


def _fail_engine(rack: SimRack, name: NodeId) -> None:
    engine = rack.sites[name].engine
    if engine is not None:
        engine.fail_next = "injected"
