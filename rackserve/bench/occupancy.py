"""How busy ranks were over a window: shares of time, mean batches, and how many prompts waited."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rackserve.base.events import QueueChanged, StepDone
from rackserve.base.ids import NodeId, Rank
from rackserve.base.units import Time
from rackserve.bench.records import RecordedEvent


def busy_share(events: Sequence[RecordedEvent], workers: Collection[NodeId], begin: Time, end: Time) -> float:
    """Share of the window in which `workers` ran steps, mean over them; a step before it counts from its beginning."""
    steps: dict[tuple[NodeId, int], Time] = {}
    for item in events:
        event = item.event
        if isinstance(event, StepDone) and event.rank.worker in workers:
            steps[event.rank.worker, event.number] = min(event.duration_ns, item.at_ns - begin)
    return sum(steps.values()) / ((end - begin) * len(workers))


def mean_batch(events: Sequence[RecordedEvent], workers: Collection[NodeId]) -> float:
    """Sequences in the steps of single ranks of `workers`, mean over the time of their steps; 0 without any."""
    steps = [event for item in events if isinstance(event := item.event, StepDone) and event.rank.worker in workers]
    total = sum(event.duration_ns for event in steps)
    return sum(event.num_sequences * event.duration_ns for event in steps) / total if total else 0.0


def mean_waiting(
    events: Sequence[RecordedEvent], workers: Collection[NodeId], begin: Time, end: Time, num_parts: int
) -> tuple[float, ...]:
    """Requests of all ranks of `workers` that wait for their first step, mean over each of equal parts of the window.

    A rank counts from its first event in the window on. Events are in order of time.
    """
    edges = [begin + (end - begin) * part // num_parts for part in range(num_parts + 1)]
    sums, queued = [0] * num_parts, dict[Rank, int]()
    part, before, waiting = 0, begin, 0

    def spread(until: Time) -> None:
        """Add what waits to the parts from `before` to `until`."""
        nonlocal part, before
        while before < until:
            upto = min(until, edges[part + 1])
            sums[part] += waiting * (upto - before)
            before = upto
            if upto == edges[part + 1] and part + 1 < num_parts:
                part += 1

    for item in events:
        event = item.event
        if isinstance(event, QueueChanged) and event.rank.worker in workers:
            spread(min(end, item.at_ns))
            waiting += event.queued - queued.get(event.rank, 0)
            queued[event.rank] = event.queued
    spread(end)
    return tuple(total / (high - low) if high > low else 0.0 for total, low, high in zip(sums, edges, edges[1:], strict=False))
