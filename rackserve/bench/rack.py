"""What the rack did during a run, from its recorded events: balance, idle time, where cached tokens came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from rackserve.base import events as ev
from rackserve.base.ids import Rank
from rackserve.base.topology import ROLES, Role
from rackserve.base.units import Time
from rackserve.bench.idle import idle_while_others_queue
from rackserve.bench.records import RecordedEvent


class RankWork(msgspec.Struct, frozen=True):
    """One rank's share of a run. `uncached_tokens` is prompt work admitted; `busy_ns` the engine time of its steps."""

    rank: str
    num_requests: int
    prompt_tokens: int
    uncached_tokens: int
    local_tokens: int
    fetched_tokens: int
    num_steps: int
    busy_ns: Time


class RackSummary(msgspec.Struct, frozen=True):
    """Rack-side figures of one run.

    balance             largest / mean uncached prompt tokens over the prefill ranks, idle ones too; 1 is even
    lockstep_idle_share time in which a prefill group ran no step while another rank had requests queued, over the run's time,
                        mean over prefill groups
    local, fetched, uncached tokens   prompt tokens by where their KV came from, over all attempts
    """

    ranks: tuple[RankWork, ...]
    balance: float | None
    lockstep_idle_share: float | None
    local_tokens: int
    fetched_tokens: int
    uncached_tokens: int
    num_retries: int
    num_preemptions: int
    num_evicted_blocks: int
    num_dropped_messages: int
    transfers: dict[str, int]


def role_of(worker: str) -> str:
    """`prefill` for worker `prefill0`."""
    return worker.rstrip("0123456789")


def placeable(recorded: Iterable[RecordedEvent], role: Role) -> set[Rank]:
    """Ranks of a role that requests were or might have been placed on: an idle rank is one too."""
    placed = [event for item in recorded if isinstance(event := item.event, ev.RequestPlaced)]
    if role == "decode":
        return {event.decode for event in placed}
    return {rank for event in placed for rank in (event.prefill, *(rank for rank, _ in event.costs))}


class _Work:
    __slots__ = ("busy_ns", "fetched", "local", "prompt", "requests", "steps")

    def __init__(self) -> None:
        self.requests = self.prompt = self.local = self.fetched = self.steps = self.busy_ns = 0


def summarize_rack(recorded: Iterable[RecordedEvent], duration_ns: Time) -> RackSummary:
    """Figures of the rack over a run that took `duration_ns`."""
    recorded = tuple(recorded)
    work = {str(rank): _Work() for role in ROLES for rank in placeable(recorded, role)}
    counts: Counter[str] = Counter()
    transfers: Counter[str] = Counter()
    for item in recorded:
        event = item.event
        if isinstance(event, ev.PrefillAdmitted):
            rank = work.setdefault(str(event.rank), _Work())
            rank.requests += 1
            rank.prompt += event.prompt_tokens
            rank.local += event.local_tokens
            rank.fetched += event.fetched_tokens
        elif isinstance(event, ev.StepDone) and not event.dummy:
            rank = work.setdefault(str(event.rank), _Work())
            rank.steps += event.num_passes
            rank.busy_ns += event.duration_ns
        elif isinstance(event, ev.TransferDone):
            transfers[f"{event.kind} {event.outcome}"] += 1
        elif isinstance(event, ev.BlocksEvicted):
            counts["evicted"] += event.num_blocks
        elif isinstance(event, ev.AttemptRetried | ev.Preempted | ev.MessageDropped):
            counts[type(event).__name__] += 1
    ranks = tuple(
        RankWork(name, w.requests, w.prompt, w.prompt - w.local - w.fetched, w.local, w.fetched, w.steps, w.busy_ns)
        for name, w in sorted(work.items())
    )
    prefill = [rank for rank in ranks if role_of(rank.rank.split(".")[0]) == "prefill"]
    mean = sum(rank.uncached_tokens for rank in prefill) / len(prefill) if prefill else 0.0
    groups = {rank.rank.split(".")[0] for rank in prefill}
    idle_ns = sum(idle_while_others_queue(recorded, groups).values())
    return RackSummary(
        ranks=ranks,
        balance=max(rank.uncached_tokens for rank in prefill) / mean if mean else None,
        lockstep_idle_share=idle_ns / (duration_ns * len(groups)) if groups and duration_ns > 0 else None,
        local_tokens=sum(rank.local_tokens for rank in ranks),
        fetched_tokens=sum(rank.fetched_tokens for rank in ranks),
        uncached_tokens=sum(rank.uncached_tokens for rank in ranks),
        num_retries=counts["AttemptRetried"],
        num_preemptions=counts["Preempted"],
        num_evicted_blocks=counts["evicted"],
        num_dropped_messages=counts["MessageDropped"],
        transfers=dict(sorted(transfers.items())),
    )
