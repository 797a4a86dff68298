"""Token budget -> `Step`: which positions of which sequences one rank computes next.

Continuous batching without phases: a sequence with one pending position and one with ten thousand are planned by the same rule.
Sequences that generate come first (they are short and someone is reading), then prompts in chunks (see `queue.turns`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.ids import Rank
from rackserve.base.ranges import MAX_COUNT, require_range
from rackserve.base.step import Step, StepItem, StepResult
from rackserve.base.units import blocks_for
from rackserve.kv.rank_cache import RankCache
from rackserve.sched.carried import Carried, can_be_carried, room_of, settle
from rackserve.sched.queue import ORDERS, turns
from rackserve.sched.sampling import describe, take
from rackserve.sched.sequence import Sequence
from rackserve.sched.states import chunk, snapshot


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one rank.

    max_batched_tokens   positions computed in one step
    max_sequences        sequences that hold blocks and may be in a step
    max_steps_in_flight  1, or 2 to plan a step while the one before it runs
    num_draft            draft tokens to verify per generating sequence and step (0: none); forces one step in flight
    order                how waiting requests are ordered, and long prompts beside short ones: a name in `sched.queue.ORDERS`
    max_skips            how often a request that does not fit may be passed by smaller ones behind it
    carry                plan a sequence again only when it ends, if its request came without token ids (simulation); its output
                         is reported then. Needs one step in flight and a token budget for all sequences
    """

    max_batched_tokens: int = 512
    max_sequences: int = 32
    max_steps_in_flight: int = 2
    num_draft: int = 0
    order: str = "fcfs"
    max_skips: int = 16
    carry: bool = False

    def __post_init__(self) -> None:
        require_range("scheduler", self, ("max_batched_tokens", "max_sequences"), 1, MAX_COUNT)
        if self.max_steps_in_flight not in (1, 2):
            raise ConfigError(f"scheduler.max_steps_in_flight must be 1 or 2, got {self.max_steps_in_flight}")
        require_range("scheduler", self, ("num_draft", "max_skips"), 0, MAX_COUNT)
        if self.num_draft and self.max_steps_in_flight != 1:
            raise ConfigError("scheduler.num_draft > 0 needs scheduler.max_steps_in_flight = 1")
        if self.carry and self.max_steps_in_flight != 1:
            raise ConfigError("scheduler.carry needs scheduler.max_steps_in_flight = 1")
        needed = self.max_sequences * (self.num_draft + 1)
        if self.carry and self.max_batched_tokens < needed:
            raise ConfigError(
                f"scheduler.carry needs scheduler.max_batched_tokens >= max_sequences * (num_draft + 1) = {needed}"
            )
        if self.order not in ORDERS:
            raise ConfigError(f"scheduler.order must be one of {', '.join(sorted(ORDERS))}, got {self.order!r}")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a finished step did for one sequence: positions computed and output tokens accepted (after stop rules)."""

    sequence: Sequence
    num_computed: int
    first_output: int
    tokens: tuple[int, ...]


class Scheduler:
    """Plans the steps of one rank. Sequences are added when their blocks are in place and removed when they end.

    room      tokens that each sequence of the step planned last may draw before one of them has to be planned
    changed   whether sequences came or left since then
    reports   what sequences have drawn that may now lose their blocks, for the caller to take out
    started   likewise the sequences that were planned for the first time
    """

    def __init__(self, config: SchedulerConfig, rank: Rank, cache: RankCache, block_tokens: int) -> None:
        self.config = config
        self.rank = rank
        self._cache = cache
        self._block_tokens = block_tokens
        self._divides = ORDERS[config.order].divides
        self.room = 1
        self.changed = False
        self.reports: list[Progress] = []
        self.started: list[Sequence] = []
        self._sequences: dict[int, Sequence] = {}
        self._named: dict[int, Sequence] = {}  # those that are not carried
        self._carried = Carried()
        self._joined: dict[int, int] = {}  # number -> place in the order of joining
        self._num_joined = 0
        self._num_flying = 0
        self._in_flight: dict[tuple[int, int], Sequence] = {}
        self._leaving: list[Sequence] = []  # carried ones that ended while a step was in flight
        self._retired: list[int] = []

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in state `ready` into the batch."""
        if sequence.state != "ready":
            raise InvariantError(f"sequence {sequence.key} joins the batch in state {sequence.state}")
        self._sequences[sequence.number] = self._named[sequence.number] = sequence
        self._num_joined += 1
        self._joined[sequence.number] = self._num_joined
        self.changed = True

    def remove(self, sequence: Sequence) -> None:
        """Plan it no more; the engine is told to forget it with the next step. Steps in flight still finish.

        What a carried sequence has drawn since it was planned is lost.
        """
        number = sequence.number
        if self._sequences.pop(number, None) is None:
            return
        self.changed = True
        del self._joined[number]
        if self._named.pop(number, None) is None and sequence in self._carried:
            self._carried.remove(number)
            if self._num_flying:
                sequence.holds += 1
                sequence.in_flight += 1
                self._leaving.append(sequence)
        if sequence.sent_blocks:
            self._retired.append(number)

    def pending(self, sequence: Sequence) -> int:
        """Positions that could be computed now: known ones, or the one whose token a step in flight will yield."""
        if sequence.evict_me or sequence.ended:
            return 0
        outputs = len(sequence.outputs) + sequence.sampling
        if outputs >= sequence.max_outputs:
            return 0
        return sequence.num_known + sequence.sampling - sequence.scheduled

    @property
    def has_work(self) -> bool:
        return len(self._carried) > 0 or any(self.pending(sequence) > 0 for sequence in self._named.values())

    def plan(self) -> tuple[Step | None, list[Sequence]]:
        """The next step, or None if nothing is pending; and the sequences preempted to make room.

        A preempted sequence has left the batch; its owner releases its blocks once `holds` is 0.
        """
        if not self._named:
            return self._plan_carried(), []
        preempted = [sequence for sequence in self._named.values() if sequence.evict_me and not sequence.in_flight]
        for sequence in preempted:
            sequence.move("preempted")
            self.remove(sequence)
        if self.config.carry:
            if self._is_short():
                self._name_all()
            else:
                self._grow()
        budget = self.config.max_batched_tokens - len(self._carried) * (self.config.num_draft + 1)
        items: list[StepItem] = []
        waiting = [(self.pending(sequence), sequence) for sequence in self._named.values()]
        due = turns(waiting, budget, self.config.num_draft, divided=self._divides)
        for sequence, limit in due:
            if budget == 0:
                break
            if sequence.number not in self._named or sequence.evict_me:
                continue
            item = self._plan_item(sequence, min(limit, budget), preempted)
            if item is not None:
                items.append(item)
                budget -= item.num_tokens + item.num_draft
        if not items:
            return self._plan_carried(), preempted
        return self._step(tuple(items), self._room(items, len(due))), preempted

    def _plan_carried(self) -> Step | None:
        """A step of those that go on by themselves, if there are any."""
        if self._carried:
            return self._step((), 1 if self._named else self._carried.room)
        self.changed, self.room = False, MAX_COUNT
        return None

    def _step(self, items: tuple[StepItem, ...], room: int) -> Step:
        self.changed, self.room = False, room
        self._num_flying += 1
        carried, drafts = self._carried, self.config.num_draft
        return Step(self.rank.dp_rank, items, self._take_retired(), len(carried), carried.context_tokens, drafts)

    def dummy(self) -> Step:
        """A step without sequences, for a rank whose group has work elsewhere."""
        self._num_flying += 1
        return Step(self.rank.dp_rank, (), self._take_retired())

    def apply(self, step: Step, result: StepResult) -> tuple[list[Progress], list[Sequence]]:
        """Take a finished step in: what it did, and the sequences that ended while it ran, which it held until now."""
        self._num_flying -= 1
        due = self._carried.advance(result.drawn)
        if not (due or step.items or self._leaving):
            return [], []
        progress: list[Progress] = []
        for sequence, drawn in due:
            self._settle(sequence, drawn)
            if sequence.finish is not None:
                progress.append(_report(sequence, drawn))
        left = self._take_leaving()
        for item, done in zip(step.items, result.items, strict=True):
            sequence = self._land(item)
            if sequence.ended or sequence.finish is not None:
                left.append(sequence)
                continue
            take(sequence, item, done, self._block_tokens)
            if not (self.config.carry and self._carry(sequence)):
                progress.append(_report(sequence, sequence.computed - item.start))
        if self.config.carry and len(progress) > 1:
            progress.sort(key=lambda part: self._joined[part.sequence.number])
        return progress, left

    def fail(self, step: Step) -> list[Sequence]:
        """A step was lost with the engine: every sequence in it loses its hold and must be given up."""
        self._num_flying -= 1
        return [self._land(item) for item in step.items] + self._carried.sequences() + self._take_leaving()

    def _take_leaving(self) -> list[Sequence]:
        left, self._leaving = self._leaving, []
        for sequence in left:
            sequence.holds -= 1
            sequence.in_flight -= 1
        return left

    def _land(self, item: StepItem) -> Sequence:
        """An item's step has ended, well or not."""
        sequence = self._in_flight.pop((item.sequence, item.start))
        sequence.holds -= 1
        sequence.in_flight -= 1
        sequence.sampling -= item.sample
        return sequence

    # ------------------------------------------------------------ carried sequences

    def _room(self, items: list[StepItem], num_pending: int) -> int:
        """Tokens to draw before somebody has to be planned; 1 if the next step differs in any case."""
        if not self.config.carry or len(items) < num_pending:
            return 1
        room = self._carried.room if self._carried else MAX_COUNT
        for item in items:
            sequence = self._named[item.sequence]
            if not can_be_carried(sequence):
                return 1
            room = min(room, room_of(sequence, item.start, self.config.num_draft, self._block_tokens))
        return room

    def _carry(self, sequence: Sequence) -> bool:
        """Plan it no more until it is due, if that may be; True if it may, in this step or soon."""
        if sequence.state != "ready" or not can_be_carried(sequence):
            return False
        room = room_of(sequence, sequence.scheduled, self.config.num_draft, self._block_tokens)
        if room > 0:
            sequence.move("running")
            del self._named[sequence.number]
            self._carried.add(sequence, room)
        return True

    def _settle(self, sequence: Sequence, drawn: int) -> None:
        """Write down what a sequence has drawn while it was carried: it ends, or is planned again."""
        settle(sequence, drawn)
        if sequence.finish is None:
            self._named[sequence.number] = sequence

    def _grow(self) -> None:
        """Sequences that were due for no more than a block get it and go on, in the order in which they would be planned."""
        for sequence in list(self._named.values()):
            lease = sequence.lease
            if lease is None or not sequence.sent_blocks or sequence.boundary_slot >= 0 or not can_be_carried(sequence):
                continue
            end = sequence.scheduled + 1 + self._num_draft(sequence, sequence.scheduled + 1, self.config.num_draft)
            missing = blocks_for(end, self._block_tokens) - len(lease.blocks)
            if missing <= 0 or self._cache.grow(lease, missing):
                self._carry(sequence)

    def _is_short(self) -> bool:
        """Whether the sequences that are planned now need more blocks than can be had."""
        missing = 0
        for sequence in self._named.values():
            if self.pending(sequence) and sequence.outputs and sequence.lease is not None:
                end = sequence.scheduled + 1 + self._num_draft(sequence, sequence.scheduled + 1, self.config.num_draft)
                missing += max(0, blocks_for(end, self._block_tokens) - len(sequence.lease.blocks))
        return missing > self._cache.usable

    def _name_all(self) -> None:
        """Plan every sequence one by one, as who has to give up blocks depends on all of them."""
        for sequence in self._carried.sequences():
            self._settle(sequence, self._carried.remove(sequence.number))
        self._named = dict(self._sequences)
        self.reports += [_report(sequence, 0) for sequence in self._named.values() if sequence.reported < len(sequence.outputs)]

    # ------------------------------------------------------------ one item

    def _plan_item(self, sequence: Sequence, budget: int, preempted: list[Sequence]) -> StepItem | None:
        start = sequence.scheduled
        known = max(0, sequence.num_known - start)
        num_tokens = min(self.pending(sequence), budget)
        if known:
            num_tokens = chunk(sequence, start, min(num_tokens, known), self._block_tokens)
        sample = start + num_tokens >= sequence.num_known
        num_draft = self._num_draft(sequence, start + num_tokens, budget - num_tokens) if sample and sequence.outputs else 0
        if not self._make_room(sequence, start + num_tokens + num_draft, preempted):
            return None
        table, layout = sequence.block_table, self._cache.layout
        state, state_at = snapshot(sequence, start, start + num_tokens, num_draft, self._block_tokens)
        num_before = min(layout.history_tokens, start) if sequence.sent_blocks == 0 else 0
        prompt = sequence.request.num_tokens
        item = StepItem(
            sequence.number,
            start,
            num_tokens,
            sequence.token_bytes(start, num_tokens) if known else b"",
            tuple(table[sequence.sent_blocks :]),
            sample,
            sequence.request.num_emitted + len(sequence.outputs) + sequence.sampling,
            sequence.request.sampling,
            num_draft=num_draft,
            restore=sequence.restore,
            snapshot=state,
            snapshot_at=state_at,
            logprobs=sequence.request.logprobs,
            history=sequence.token_bytes(start - num_before, num_before),
            replayed=max(0, min(sequence.replay_end - start, num_tokens)),
            full_from=max(0, prompt - layout.tail_tokens) if layout.tail_tokens and start < prompt else 0,
        )
        if sequence.asks:
            item = describe(item, sequence)
        sequence.restore = -1
        if not sequence.sent_blocks:
            self.started.append(sequence)
        sequence.sent_blocks = len(table)
        sequence.scheduled = start + num_tokens
        sequence.in_flight += 1
        sequence.holds += 1
        sequence.sampling += sample
        if sequence.state == "ready":
            sequence.move("running")
        self._in_flight[(sequence.number, start)] = sequence
        return item

    def _num_draft(self, sequence: Sequence, end: int, budget: int) -> int:
        """Drafts to verify after position `end`: no more than may be output, nor past a second boundary to store state at."""
        left = sequence.max_outputs - len(sequence.outputs) - sequence.sampling
        if sequence.boundary_slot >= 0:
            left = min(left, 2 * self._block_tokens - 1 - (end - 1) % self._block_tokens)
        return max(0, min(self.config.num_draft, left - 1, budget))

    def _make_room(self, sequence: Sequence, num_positions: int, preempted: list[Sequence]) -> bool:
        """Blocks for `num_positions` positions, taken from the youngest other sequences if the rank has none left."""
        lease = sequence.lease
        if lease is None:
            raise InvariantError(f"sequence {sequence.key} is in the batch without blocks")
        missing = blocks_for(num_positions, self._block_tokens) - len(lease.blocks)
        if missing <= 0:
            return True
        while not self._cache.grow(lease, missing):
            youngest = max(self._sequences.values(), key=lambda other: other.number)
            if youngest.in_flight:
                youngest.evict_me = True  # its blocks are being written: it goes when its step ends
                return False
            youngest.move("preempted")
            self.remove(youngest)
            preempted.append(youngest)
            if youngest is sequence:
                return False
            if youngest.lease is not None and youngest.holds == 0:
                self._cache.release(youngest.lease)
                youngest.lease = None
        return True

    def _take_retired(self) -> tuple[int, ...]:
        retired, self._retired = tuple(self._retired), []
        return retired

    def check(self) -> None:
        """Raise InvariantError if a count is off (laws I2, I4 and I7)."""
        flying: dict[int, int] = {}
        for number, _ in self._in_flight:
            flying[number] = flying.get(number, 0) + 1
        for sequence in self._sequences.values():
            if sequence.in_flight != flying.get(sequence.number, 0) or sequence.holds < sequence.in_flight:
                raise InvariantError(f"sequence {sequence.key}: {sequence.in_flight} steps in flight, holds {sequence.holds}")
            if not 0 <= sequence.computed <= sequence.scheduled:
                raise InvariantError(f"sequence {sequence.key}: computed {sequence.computed} of {sequence.scheduled} scheduled")
            if sequence.lease is not None and sequence.lease.committed * self._block_tokens > sequence.num_present:
                raise InvariantError(f"sequence {sequence.key}: {sequence.lease.committed} blocks announced too early (I4)")


def _report(sequence: Sequence, num_computed: int) -> Progress:
    """All output that the sequence's owner has not been told of."""
    first = sequence.reported
    sequence.reported = len(sequence.outputs)
    return Progress(sequence, num_computed, first, tuple(sequence.outputs[first:]))
