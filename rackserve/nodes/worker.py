"""What prefill and decode workers share: ranks with caches and schedulers, the step loop, transfers, spilling to the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rackserve.base.errors import InvariantError
from rackserve.base.events import BlocksEvicted, MessageDropped, Preempted, QueueChanged, StepDone
from rackserve.base.ids import POOL, Attempt, NodeId, Rank
from rackserve.base.keys import count
from rackserve.base.kv_layout import KvLayout
from rackserve.base.messages import (
    PREEMPTED,
    EngineFailed,
    Message,
    PoolCancel,
    PoolCommit,
    PoolGranted,
    PoolStore,
    SnapshotWanted,
    StepFinished,
    Timeout,
    TransferFailed,
    TransferFinished,
)
from rackserve.base.request import Placement, Request
from rackserve.base.step import GroupStep
from rackserve.base.transfer import Region, arena_region
from rackserve.base.units import Time
from rackserve.kv.rank_cache import RankCache
from rackserve.nodes.alarms import Alarms
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.moves import Moves, pool_copies
from rackserve.nodes.ports import Ports
from rackserve.nodes.presence import Announcer
from rackserve.ports import Engine
from rackserve.runs.cache import Removed
from rackserve.sched.lockstep import LockstepGroup
from rackserve.sched.queue import ORDERS, WaitingQueue
from rackserve.sched.scheduler import Progress, Scheduler, SchedulerConfig
from rackserve.sched.sequence import Sequence, State, new_sequence


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
    ) -> None:
        if ports.engine is None or ports.store is None:
            raise InvariantError("a worker needs an engine and a store port")
        self.layout = layout
        self.deadlines = deadlines
        self.ports = ports
        self.config = scheduler
        self.ranks = [Rank(worker, index) for index in range(num_ranks)]
        windows = num_windows if layout.has_window else 0
        self.caches = [RankCache(rank, layout, num_blocks, windows) for rank in self.ranks]
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
        self._pool = pool
        self.alarms = Alarms(ports.clock, self._on_timeout)
        self.moves = Moves(
            ports.store, layout, self.alarms, deadlines.ns("transfer"), ports, lambda s: self.ranks[self.dp_rank(s)]
        )
        self._spilling: dict[Attempt, Sequence] = {}
        self._grants: set[int] = set()
        self.queues = [WaitingQueue(ORDERS[scheduler.order](), scheduler.max_skips) for _ in self.ranks]
        self._queue_counts = [[0, 0] for _ in self.ranks]
        self._numbers = 0
        self.handlers: dict[type[Message], Callable[..., None]] = {  # of the messages that any worker gets
            PoolGranted: self._on_pool_granted,
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
        sequence = new_sequence(self._numbers, request, placement, state, max_outputs)
        sequence.extend_chain_to(request.num_tokens // self.layout.block_tokens, self.layout.block_tokens)
        self.sequences[sequence.key] = sequence
        return sequence

    def acquire(self, sequence: Sequence, dp_rank: int, matched: int, num_blocks: int) -> bool:
        """Blocks for `sequence`: `matched` from the prefix cache, up to `num_blocks` in all; False if they cannot be had."""
        cache = self.caches[dp_rank]
        lease = cache.acquire(sequence.chain, matched, num_blocks - matched)
        if lease is None:
            return False
        sequence.lease = lease
        sequence.restore = lease.restore
        if self.layout.has_window:
            slots = [cache.allocate_window(lease), cache.allocate_window(lease)]
            if None in slots:
                cache.release(lease)
                sequence.lease = None
                return False
            sequence.boundary_slot, sequence.end_slot = (slot for slot in slots if slot is not None)
        return True

    def num_active(self, dp_rank: int) -> int:
        """Sequences that hold blocks on a rank and have not ended."""
        return sum(s.lease is not None and not s.ended and self.dp_rank(s) == dp_rank for s in self.sequences.values())

    def has_place(self, dp_rank: int) -> bool:
        """Whether one more sequence may hold blocks on a rank."""
        return self.num_active(dp_rank) < self.config.max_sequences

    def forget(self, sequence: Sequence) -> None:
        """Give back what an ended sequence holds, as soon as no step or transfer touches it any more."""
        if not sequence.ended or sequence.holds or sequence.key in self._spilling:
            return
        if self.sequences.get(sequence.key) is sequence:
            del self.sequences[sequence.key]
            self.alarms.clear(*sequence.key)
        lease, dp_rank = sequence.lease, self.dp_rank(sequence)
        if lease is None:
            return
        sequence.lease = None
        for num_blocks, slot in sequence.window_states:
            if 0 < num_blocks <= lease.committed:
                self.caches[dp_rank].commit_window(lease, num_blocks, slot)
        self.caches[dp_rank].release(lease)
        self.on_room(dp_rank)

    def enqueue(self, sequence: Sequence) -> None:
        """Let a new sequence wait for blocks and a place on its rank; it may find them at once."""
        dp_rank = self.dp_rank(sequence)
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
        sequence.move(state)
        self.group.schedulers[self.dp_rank(sequence)].remove(sequence)
        self.forget(sequence)

    def dp_rank(self, sequence: Sequence) -> int:
        """The rank of this worker that serves `sequence`."""
        placement = sequence.placement
        worker = self.ranks[0].worker
        return placement.prefill.dp_rank if placement.prefill.worker == worker else placement.decode.dp_rank

    def commit(self, sequence: Sequence) -> int:
        """Announce the full blocks whose positions are computed and known; returns how many blocks are committed."""
        lease = sequence.lease
        if lease is None:
            return 0
        full = min(sequence.computed, sequence.num_known) // self.layout.block_tokens
        chain = sequence.extend_chain_to(full, self.layout.block_tokens)
        self.caches[self.dp_rank(sequence)].commit(lease, chain, min(full, count(chain)))
        return lease.committed

    # ------------------------------------------------------------ steps

    def pump(self) -> None:
        """Start every step that may start now (law I8), then announce what changed."""
        while True:
            planned = self.group.plan()
            for sequence in planned.preempted:
                self.ports.recorder.record(Preempted(*sequence.key, self.ranks[self.dp_rank(sequence)]))
                self._owner.on_given_up(sequence, PREEMPTED)
                self.forget(sequence)
            if planned.step is None:
                break
            self._engine.start(planned.step)
        self._record_queues()
        for announcer, cache in zip(self.announcers, self.caches, strict=True):
            events = cache.take_events()
            announcer.announce(events)
            removed = sum(count(event.chain) - event.keep for event in events if isinstance(event, Removed))
            if removed:
                self.ports.recorder.record(BlocksEvicted(announcer.holder, removed))

    def _on_step_finished(self, message: StepFinished) -> None:
        group_step, progress = self.group.finish(message.number, message.results)
        self._record_step(group_step, message.duration_ns)
        for part in progress:
            self._owner.on_progress(part)
        self._settle(group_step)

    def _on_engine_failed(self, message: EngineFailed) -> None:
        """Every sequence of the lost step is given up; the engine has forgotten them."""
        for sequence in self.group.fail(message.number):
            if not sequence.ended:
                self._owner.on_given_up(sequence, f"engine: {message.reason}")
            self.forget(sequence)

    def _settle(self, group_step: GroupStep) -> None:
        """Sequences that ended while the step ran may let go of their blocks now."""
        numbers = {item.sequence for step in group_step.steps for item in step.items}
        for sequence in [s for s in self.sequences.values() if s.ended and s.number in numbers]:
            self.forget(sequence)

    def _record_step(self, group_step: GroupStep, duration: Time) -> None:
        for rank, step in zip(self.ranks, group_step.steps, strict=True):
            record = StepDone(
                rank,
                group_step.number,
                step.num_tokens,
                step.context_tokens,
                step.attended,
                len(step.items),
                sum(item.sample for item in step.items),
                duration,
                not step.items,
            )
            self.ports.recorder.record(record)

    def _record_queues(self) -> None:
        """Note how many sequences of each rank wait for their first step and how many have had one, when that changed."""
        counts = [[0, 0] for _ in self.ranks]
        for sequence in self.sequences.values():
            if not sequence.ended and sequence.state != "pushing":
                counts[self.dp_rank(sequence)][sequence.sent_blocks > 0] += 1
        for rank, now, before in zip(self.ranks, counts, self._queue_counts, strict=True):
            if now != before:
                self.ports.recorder.record(QueueChanged(rank, *now))
        self._queue_counts = counts

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

    def set_alarm(self, kind: str, sequence: Sequence) -> None:
        """Wake the owner when the deadline `kind` of this attempt has come, unless the attempt is forgotten before."""
        due = self.ports.clock.now() + self.deadlines.ns(kind)
        self.alarms.set(due, Timeout(kind, *sequence.key))

    def _on_timeout(self, message: Timeout) -> None:
        """A transfer that takes too long is cancelled: the store answers with its end, which is what frees the blocks."""
        if message.kind == "transfer":
            self.moves.cancel(int(message.key))
        elif message.kind == "spill":
            self._stop_spilling((message.key, message.attempt))
        else:
            self._owner.on_deadline(message.kind, (message.key, message.attempt))

    # ------------------------------------------------------------ spilling

    def spill(self, sequence: Sequence) -> None:
        """Offer the pool the committed blocks of a sequence that is about to end; its blocks stay until that is settled."""
        if not self._pool or sequence.lease is None or not sequence.lease.committed:
            return
        chain = sequence.lease.chain
        with_window = any(blocks == count(chain) for blocks, _ in sequence.window_states)
        if self.layout.has_window and not with_window:
            return  # blocks without a resume state are of no use to anybody
        self._spilling[sequence.key] = sequence
        rank = self.ranks[self.dp_rank(sequence)]
        request = sequence.request
        self.ports.transport.send(POOL, PoolStore(request.id, request.attempt, rank, chain, 0, with_window))
        due = self.ports.clock.now() + self.deadlines.ns("lookup")
        self.alarms.set(due, Timeout("spill", request.id, request.attempt))

    def _on_pool_granted(self, message: PoolGranted) -> None:
        if message.grant in self._grants:
            self.drop(message, "grant is in use")
            return
        sequence = self._spilling.get(message.key)
        if sequence is None or sequence.lease is None or not message.grant:
            if message.grant:
                self.ports.transport.send(POOL, PoolCancel(message.grant))
            self._stop_spilling(message.key)
            return
        del self._spilling[message.key]
        self._grants.add(message.grant)
        region = self.region(self.dp_rank(sequence))
        blocks = sequence.lease.blocks[message.from_block : message.from_block + len(message.slots)]
        copies = pool_copies(region, blocks, message.slots, "full", to_pool=True)
        if message.window_slot is not None:
            state = next(slot for held, slot in sequence.window_states if held == count(sequence.lease.chain))
            copies += pool_copies(region, [state], (message.window_slot,), "window", to_pool=True)

        def on_end(finished: bool) -> None:
            self._grants.discard(message.grant)
            self.ports.transport.send(POOL, PoolCommit(message.grant) if finished else PoolCancel(message.grant))

        self.moves.start("spill", sequence, copies, on_end)

    def _stop_spilling(self, key: Attempt) -> None:
        sequence = self._spilling.pop(key, None)
        if sequence is not None:
            self.forget(sequence)

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
        if self.group.has_work and not self.group.num_in_flight:
            raise InvariantError(f"{self.ranks[0].worker} has a ready sequence and no step in flight")

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is held for any attempt."""
        return not (
            any(len(queue) for queue in self.queues)
            or self.sequences
            or len(self.moves)
            or self._spilling
            or self.group.num_in_flight
        )
