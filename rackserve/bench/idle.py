"""Lockstep idle: time in which a group ran no step while another rank of its role had requests queued."""

from __future__ import annotations

from collections.abc import Iterable

from rackserve.base.events import QueueChanged, StepDone
from rackserve.base.ids import NodeId, Rank
from rackserve.base.units import Time
from rackserve.bench.records import RecordedEvent


def idle_while_others_queue(recorded: Iterable[RecordedEvent], workers: Iterable[NodeId]) -> dict[NodeId, Time]:
    """Nanoseconds per group of `workers` (all of one role), from its first to its last event.

    A sweep over the moments at which a queue changes or a step begins or ends; a step's beginning is its end less its duration.
    """
    names = sorted(set(workers))
    moments: list[tuple[Time, int, NodeId, Rank | None, int]] = []
    steps: set[tuple[NodeId, int]] = set()
    for item in recorded:
        event = item.event
        if isinstance(event, QueueChanged) and event.rank.worker in names:
            moments.append((item.at_ns, 0, event.rank.worker, event.rank, event.queued))
        elif isinstance(event, StepDone) and event.rank.worker in names:
            step = (event.rank.worker, event.number)
            if step not in steps:  # one group step is recorded by each of its ranks
                steps.add(step)
                moments.append((item.at_ns - event.duration_ns, 1, event.rank.worker, None, 1))
                moments.append((item.at_ns, 1, event.rank.worker, None, -1))
    moments.sort(key=lambda moment: moment[:2])
    running = dict.fromkeys(names, 0)
    queued: dict[Rank, int] = {}
    idle = dict.fromkeys(names, 0)
    before = moments[0][0] if moments else 0
    for at, kind, worker, rank, value in moments:
        waiting = {other.worker for other, number in queued.items() if number}
        for name in names:
            if not running[name] and waiting - {name}:
                idle[name] += at - before
        before = at
        if kind == 0 and rank is not None:
            queued[rank] = value
        else:
            running[worker] += value
    return idle
