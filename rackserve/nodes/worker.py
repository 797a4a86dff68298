"""What prefill and decode workers share: ranks with caches and schedulers, the step loop, transfers, spilling to the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from rackserve.base.errors import InvariantError
from rackserve.base.events import BlocksEvicted, DraftsVerified, MessageDropped, Preempted, StepDone
from rackserve.base.ids import Attempt, NodeId, Rank
from rackserve.base.keys import count
from rackserve.base.kv_layout import KvLayout
from rackserve.base.messages import (
    PREEMPTED,
    EngineFailed,
    Message,
    PoolGranted,
    SnapshotWanted,
    StepFinished,
    Timeout,
    TransferFailed,
    TransferFinished,
)
from rackserve.base.request import Placement, Request
from rackserve.base.step import GroupStep, Step, StepResult
from rackserve.base.transfer import Region, arena_region
from rackserve.kv.rank_cache import RankCache
from rackserve.nodes.alarms import Alarms
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.moves import Moves
from rackserve.nodes.ports import Ports
from rackserve.nodes.presence import Announcer
from rackserve.nodes.queue_counts import QUEUED, RUNNING, QueueCounts
from rackserve.nodes.spills import SPILL, Spiller
from rackserve.ports import Engine
from rackserve.runs.accounts import TenantsConfig
from rackserve.runs.cache import Removed
from rackserve.sched.lockstep import NOTHING, LockstepGroup
from rackserve.sched.queue import ORDERS, WaitingQueue
from rackserve.sched.scheduler import Progress, Scheduler, SchedulerConfig
from rackserve.sched.sequence import Sequence, State, new_sequence

MAX_BRANCHES = 4
"""Resume states that others may have one sequence leave on its way; each takes a window slot, maybe from an older state."""


class Owner(Protocol):
    """The node around a `Worker`."""

    def on_progress(self, progress: Progress) -> None:
        """A step computed positions or tokens of a live sequence."""

    def on_given_up(self, sequence: Sequence, reason: str) -> None:
        """The sequence left the batch without finishing: preempted, or lost with an engine step."""

    def admit(self, sequence: Sequence, dp_rank: int) -> bool | None:
        """Take blocks for a queued sequence. True: it has them. False: not yet. None: it waits for another's work."""

    def start(self, sequence: Sequence, dp_rank: int) -> None:
        """The sequence was admitted and has left the queue."""

    def on_deadline(self, kind: str, key: Attempt) -> None:
        """A deadline set with `Worker.set_alarm` has come."""


class Worker:
    """One group of ranks in lockstep. Sequences are filed by attempt until nothing of theirs is left on the rank."""

    def __init__(
        self,
        worker: NodeId,
        num_ranks: int,
        num_blocks: int,
        num_windows: int,
        layout: KvLayout,
        scheduler: SchedulerConfig,
        deadlines: Deadlines,
        ports: Ports,
        owner: Owner,
        incarnation: int,
        pool: bool,
        tenants: TenantsConfig | None = None,
    ) -> None:
        if ports.engine is None or ports.store is None:
            raise InvariantError("a worker needs an engine and a store port")
        self.layout = layout
        self._limits_ns = deadlines.all_ns()
        self.ports = ports
        self.config = scheduler
        self.ranks = [Rank(worker, index) for index in range(num_ranks)]
        windows = num_windows if layout.has_window else 0
        self.caches = [RankCache(rank, layout, num_blocks, windows, tenants) for rank in self.ranks]
        schedulers = [
            Scheduler(scheduler, rank, cache, layout.block_tokens) for rank, cache in zip(self.ranks, self.caches, strict=True)
        ]
        self.group = LockstepGroup(schedulers, scheduler.max_steps_in_flight)
        self.sequences: dict[Attempt, Sequence] = {}
        self._engine: Engine = ports.engine
        self.announcers = [
            Announcer(rank, ports.transport, cache.chains) for rank, cache in zip(self.ranks, self.caches, strict=True)
        ]
        self._owner = owner
        self._incarnation = incarnation
        self.alarms = Alarms(ports.clock, self._on_timeout)
        self.moves = Moves(
            ports.store, layout, self.alarms, deadlines.ns("transfer"), ports, lambda sequence: self.ranks[sequence.dp_rank]
        )
        self.spiller = Spiller(self, pool=pool)
        self.queues = [WaitingQueue(ORDERS[scheduler.order](), scheduler.max_skips) for _ in self.ranks]
        self._active: list[dict[int, Sequence]] = [
            {} for _ in self.ranks
        ]  # by number: those that hold blocks and have not ended
        self._counts = QueueCounts(self.ranks, ports.recorder)
        self._numbers = 0
        self.handlers: dict[type[Message], Callable[..., None]] = {  # of the messages that any worker gets
            PoolGranted: self.spiller.on_granted,
            SnapshotWanted: self._on_snapshot_wanted,
            StepFinished: self._on_step_finished,
            EngineFailed: self._on_engine_failed,
            TransferFinished: self._on_transfer_ended,
            TransferFailed: self._on_transfer_ended,
            Timeout: lambda message: self.alarms.wake(),
        }

    # ------------------------------------------------------------ sequences

    def open(self, request: Request, placement: Placement, state: State, max_outputs: int) -> Sequence:
        """A new sequence for an attempt this worker does not know yet."""
        self._numbers += 1
        rank = placement.prefill if placement.prefill.worker == self.ranks[0].worker else placement.decode
        sequence = new_sequence(self._numbers, request, placement, state, max_outputs, rank.dp_rank)
        sequence.extend_chain_to(request.num_tokens // self.layout.block_tokens, self.layout.block_tokens)
        self.sequences[sequence.key] = sequence
        self._counts.put(sequence.number, sequence.dp_rank, QUEUED)
        return sequence

    def acquire(self, sequence: Sequence, dp_rank: int, matched: int, num_blocks: int) -> bool:
        """Blocks for `sequence`: `matched` from the prefix cache, up to `num_blocks` in all; False if they cannot be had."""
        cache = self.caches[dp_rank]
        lease = cache.acquire(sequence.chain, matched, num_blocks - matched, sequence.request.tenant)
        if lease is None:
            return False
        sequence.lease = lease
        sequence.restore = lease.restore
        if self.layout.has_window:
            slots = [cache.allocate_window(lease) for _ in range(2 if self.layout.stores_state else 1)]
            if None in slots:
                cache.release(lease)
                sequence.lease = None
                return False
            sequence.end_slot, sequence.boundary_slot = (*(slot for slot in slots if slot is not None), -1)[:2]
        self._active[dp_rank][sequence.number] = sequence
        return True

    def want_state(self, sequence: Sequence, num_blocks: int) -> bool:
        """Have a sequence leave a resume state at a boundary of its prompt on its way; False if past it or without a slot."""
        position = num_blocks * self.layout.block_tokens
        if sequence.lease is None or sequence.computed >= position:
            return False
        if num_blocks in sequence.branches or num_blocks == sequence.request.num_tokens // self.layout.block_tokens:
            return True
        if sequence.scheduled >= position or len(sequence.branches) == MAX_BRANCHES:
            return False
        slot = self.caches[sequence.dp_rank].allocate_window(sequence.lease)
        if slot is not None:
            sequence.branches[num_blocks] = slot
        return slot is not None

    def num_active(self, dp_rank: int) -> int:
        """Sequences that hold blocks on a rank and have not ended."""
        return len(self._active[dp_rank])

    def active(self, dp_rank: int) -> Iterable[Sequence]:
        """Those sequences, in the order in which they came."""
        held = self._active[dp_rank]
        return [held[number] for number in sorted(held)]

    def has_requests(self) -> bool:
        """Whether a request waits for a step of this worker, its first or another."""
        return len(self._counts) > 0

    def has_place(self, dp_rank: int) -> bool:
        """Whether one more sequence may hold blocks on a rank."""
        return len(self._active[dp_rank]) < self.config.max_sequences

    def forget(self, sequence: Sequence) -> None:
        """Give back what an ended sequence holds, as soon as no step or transfer touches it any more."""
        if not sequence.ended or sequence.holds:
            return
        if self.sequences.get(sequence.key) is sequence:
            del self.sequences[sequence.key]
            self.alarms.clear(*sequence.key)
        lease, dp_rank = sequence.lease, sequence.dp_rank
        if lease is None:
            return
        sequence.lease = None
        self.caches[dp_rank].release(lease)
        self.on_room(dp_rank)

    def enqueue(self, sequence: Sequence) -> None:
        """Let a new sequence wait for blocks and a place on its rank; it may find them at once."""
        dp_rank = sequence.dp_rank
        self.queues[dp_rank].add(sequence)
        self.on_room(dp_rank)

    def on_room(self, dp_rank: int) -> None:
        """Blocks, a place or another's work may be there now: admit queued sequences while they last."""
        queue = self.queues[dp_rank]
        while len(queue) and self.has_place(dp_rank):
            sequence = queue.pick(lambda candidate: self._owner.admit(candidate, dp_rank))
            if sequence is None:
                break
            self._owner.start(sequence, dp_rank)

    def end(self, sequence: Sequence, state: State) -> None:
        """Move to a final state, leave the batch, and give blocks back when possible."""
        self.leave(sequence, state)
        self._active[sequence.dp_rank].pop(sequence.number, None)
        self.forget(sequence)

    def leave(self, sequence: Sequence, state: State) -> None:
        """Move to a state in which there is nothing to compute."""
        sequence.move(state)
        self.group.schedulers[sequence.dp_rank].remove(sequence)
        self._counts.take(sequence.number)

    def commit(self, sequence: Sequence) -> int:
        """Announce the full blocks whose positions are computed and known, and store the states that were left at their ends.

        Returns how many blocks are committed.
        """
        lease = sequence.lease
        if lease is None:
            return 0
        cache = self.caches[sequence.dp_rank]
        full = min(sequence.num_present, sequence.num_known) // self.layout.block_tokens
        chain = sequence.extend_chain_to(full, self.layout.block_tokens)
        cache.commit(lease, chain, min(full, count(chain)))
        for num_blocks, slot in sequence.stored:
            if num_blocks <= lease.committed:
                cache.commit_window(lease, num_blocks, slot)
                if slot == sequence.boundary_slot:
                    sequence.boundary_slot = cache.state_slot(lease)  # another sequence may have stored the same state before
        sequence.stored.clear()
        return lease.committed

    # ------------------------------------------------------------ steps

    def pump(self) -> None:
        """Start every step that may start now (law I8), then announce what changed."""
        while True:
            planned = self.group.plan()
            if planned is NOTHING:
                break
            for part in planned.reports:
                self._owner.on_progress(part)
            for sequence in planned.started:
                self._counts.put(sequence.number, sequence.dp_rank, RUNNING)
            for sequence in planned.preempted:
                self._counts.take(sequence.number)
                self._active[sequence.dp_rank].pop(sequence.number, None)
                self.ports.recorder.record(Preempted(*sequence.key, self.ranks[sequence.dp_rank]))
                self._owner.on_given_up(sequence, PREEMPTED)
                self.forget(sequence)
            if planned.step is None:
                break
            self._engine.start(planned.step)
        if self.group.interrupts():
            self._engine.interrupt()
        self._counts.record()
        for announcer, cache in zip(self.announcers, self.caches, strict=True):
            if not cache.has_events:
                continue
            events = cache.take_events()
            announcer.announce(events)
            removed = sum(count(event.chain) - event.keep for event in events if isinstance(event, Removed))
            if removed:
                self.ports.recorder.record(BlocksEvicted(announcer.holder, removed))

    def _on_step_finished(self, message: StepFinished) -> None:
        group_step, progress, left = self.group.finish(message.number, message.results)
        self._record_step(group_step, message)
        for part in progress:
            self._owner.on_progress(part)
        for sequence in left:
            self.forget(sequence)

    def _on_engine_failed(self, message: EngineFailed) -> None:
        """Every sequence of the lost step is given up; the engine has forgotten them."""
        for sequence in self.group.fail(message.number):
            if not sequence.ended:
                self._owner.on_given_up(sequence, f"engine: {message.reason}")
            self.forget(sequence)

    def _record_step(self, group_step: GroupStep, done: StepFinished) -> None:
        for rank, step, result in zip(self.ranks, group_step.steps, done.results, strict=True):
            sequences, context, number = step.num_sequences, step.context_tokens, group_step.number
            tokens, sampled, attended = step.carried, step.carried, context + step.carried
            if step.items:
                tokens, attended = step.num_tokens, step.attended
                sampled += sum([item.sample for item in step.items])
            record = StepDone(
                rank, number, tokens, context, attended, sequences, sampled, done.duration_ns, not sequences, result.num_passes
            )
            self.ports.recorder.record(record)
            drafts = drafts_verified(rank, step, result) if step.items and result.num_passes == 1 else None
            if drafts is not None:
                self.ports.recorder.record(drafts)

    # ------------------------------------------------------------ transfers

    def region(self, dp_rank: int) -> Region:
        return arena_region(self.ranks[dp_rank], self._incarnation)

    def _on_transfer_ended(self, message: TransferFinished | TransferFailed) -> None:
        sequence = self.moves.end(message)
        if sequence is None:
            self.drop(message, "transfer is over")
        else:
            self.forget(sequence)

    # ------------------------------------------------------------ deadlines

    def set_alarm(self, kind: str, sequence: Sequence, limit: str = "") -> None:
        """Wake the owner when the deadline `kind` of this attempt has come, unless the attempt is forgotten before.

        limit   the name of the deadline that says how long that is, if it is another
        """
        due = self.ports.clock.now() + self._limits_ns[limit or kind]
        self.alarms.set(due, Timeout(kind, *sequence.key))

    def _on_timeout(self, message: Timeout) -> None:
        """A transfer that takes too long is cancelled: the store answers with its end, which is what frees the blocks."""
        if message.kind == "transfer":
            self.moves.cancel(int(message.key))
        elif message.kind == SPILL:
            self.spiller.give_up((message.key, message.attempt))
        else:
            self._owner.on_deadline(message.kind, (message.key, message.attempt))

    # ------------------------------------------------------------ presence and laws

    def _on_snapshot_wanted(self, message: SnapshotWanted) -> None:
        for announcer in self.announcers:
            if announcer.holder == message.holder:
                announcer.snapshot()

    def drop(self, message: Message, reason: str) -> None:
        """Note a message that came too late or twice (law I10)."""
        self.ports.recorder.record(MessageDropped(self.ranks[0].worker, type(message).__name__, reason))

    def check(self) -> None:
        """Raise InvariantError if a law does not hold on this worker (I2, I7, I8)."""
        for cache, scheduler in zip(self.caches, self.group.schedulers, strict=True):
            cache.check()
            scheduler.check()
        self._counts.check((sequence.dp_rank, sequence) for sequence in self.sequences.values())
        active = {number: sequence for held in self._active for number, sequence in held.items()}
        missing = [s.key for s in self.sequences.values() if s.lease is not None and not s.ended and s.number not in active]
        ended = [sequence.key for sequence in active.values() if sequence.ended]
        if missing or ended:
            raise InvariantError(
                f"{self.ranks[0].worker}: {missing} hold blocks and are not active, {ended} are and have ended"
            )
        if self.group.has_work and not self.group.num_in_flight:
            raise InvariantError(f"{self.ranks[0].worker} has a ready sequence and no step in flight")

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is held for any attempt."""
        return not (
            any(len(queue) for queue in self.queues)
            or self.sequences
            or len(self.moves)
            or not self.spiller.is_quiet
            or self.group.num_in_flight
        )


def drafts_verified(rank: Rank, step: Step, result: StepResult) -> DraftsVerified | None:
    """What became of the drafts of a step; None if none could be verified in it."""
    parts = [
        (done.num_verified, len(done.tokens) - 1) for item, done in zip(step.items, result.items, strict=True) if item.num_draft
    ]
    if not parts:
        return None
    deepest = max(verified for verified, _ in parts)
    verified, accepted = (tuple(sum(part[which] > at for part in parts) for at in range(deepest)) for which in (0, 1))
    return DraftsVerified(rank, len(parts), verified, accepted)
