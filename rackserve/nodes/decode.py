"""A decode worker: reserves blocks, receives KV, joins sequences to the running batch and emits their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rackserve.base.ids import FRONTEND, ROUTER, Attempt
from rackserve.base.messages import (
    AbortAttempt,
    AttemptFailed,
    AttemptFinished,
    HandOver,
    Message,
    PushesEnded,
    RankDown,
    Reserve,
    Reserved,
    TokensEmitted,
)
from rackserve.base.units import blocks_for
from rackserve.nodes.worker import Worker
from rackserve.sched.scheduler import Progress
from rackserve.sched.sequence import Sequence


@dataclass(slots=True)
class _Visit:
    """What a decode rank must remember of an attempt. `exposed`: a prefill rank may be writing to its blocks."""

    cached_tokens: int = 0
    exposed: bool = False


class DecodeNode:
    """Node of one decode worker."""

    def __init__(self, worker_of: Callable[[DecodeNode], Worker]) -> None:
        self.worker = worker_of(self)
        self._visits: dict[Attempt, _Visit] = {}
        self._handlers: dict[type[Message], Callable[..., None]] = self.worker.handlers | {
            Reserve: self._on_reserve,
            HandOver: self._on_hand_over,
            PushesEnded: self._on_pushes_ended,
            AbortAttempt: self._on_abort,
            RankDown: self._on_rank_down,
        }

    def handle(self, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)
            self.worker.pump()

    # ------------------------------------------------------------ reservation

    def _on_reserve(self, message: Reserve) -> None:
        request, worker = message.request, self.worker
        if message.placement.key in worker.sequences:
            worker.drop(message, "duplicate")
            return
        dp_rank = message.placement.decode.dp_rank
        needed = blocks_for(request.num_tokens + request.max_tokens, worker.layout.block_tokens)
        if dp_rank >= len(worker.ranks) or needed > worker.caches[dp_rank].num_blocks:
            reason = f"prompt and output need {needed} blocks"
            self._fail(request.key, message.placement.prefill.worker, dp_rank % len(worker.ranks), reason, retry=False)
            return
        sequence = worker.open(request, message.placement, "reserved", request.max_tokens)
        self._visits[sequence.key] = _Visit()
        self.worker.set_alarm("receive", sequence)
        self.worker.enqueue(sequence)

    def admit(self, sequence: Sequence, dp_rank: int) -> bool:
        """Blocks for the prompt and the first token. Blocks of the prompt that this rank has need not be pushed.

        Each sequence that is here must find one more block to grow into, or the newcomer would soon be preempted for it.
        """
        block_tokens = self.worker.layout.block_tokens
        num_tokens = sequence.request.num_tokens
        cache = self.worker.caches[dp_rank]
        matched = cache.present(sequence.chain, num_tokens // block_tokens)
        needed = blocks_for(num_tokens + 1, block_tokens)
        if needed - matched + self.worker.num_active(dp_rank) > cache.usable:
            return False
        return self.worker.acquire(sequence, dp_rank, matched, needed)

    def start(self, sequence: Sequence, dp_rank: int) -> None:
        """Name the blocks that the prefill rank may push to."""
        worker, request = self.worker, sequence.request
        sequence.move("receiving")
        self._visits[sequence.key].exposed = True
        first = sequence.lease.matched if sequence.lease is not None else 0
        upto = blocks_for(request.num_tokens, worker.layout.block_tokens)
        message = Reserved(
            request.id,
            request.attempt,
            worker.ranks[dp_rank],
            worker.region(dp_rank),
            first,
            tuple(sequence.block_table[first:upto]),
            sequence.end_slot,
        )
        worker.ports.transport.send(sequence.placement.prefill.worker, message)

    # ------------------------------------------------------------ running

    def _on_hand_over(self, message: HandOver) -> None:
        worker = self.worker
        sequence, visit = worker.sequences.get(message.key), self._visits.get(message.key)
        if sequence is None or visit is None:
            worker.drop(message, "attempt is over")
            return
        visit.exposed = False  # every push has ended before the hand-over was sent
        if sequence.state != "receiving":
            worker.drop(message, f"state is {sequence.state}")
            self._leave(sequence)
            return
        visit.cached_tokens = message.cached_tokens
        sequence.computed = sequence.scheduled = sequence.request.num_tokens
        sequence.outputs.extend(message.first_tokens)
        sequence.reported = len(sequence.outputs)  # the prefill rank has sent them
        if sequence.request.tokens:
            sequence.tokens.extend(message.first_tokens)
        sequence.restore = sequence.end_slot
        worker.commit(sequence)
        sequence.move("ready")
        dp_rank = sequence.dp_rank
        worker.group.schedulers[dp_rank].add(sequence)

    def on_progress(self, progress: Progress) -> None:
        worker, sequence = self.worker, progress.sequence
        request = sequence.request
        worker.commit(sequence)
        start = progress.first_output
        emitted = TokensEmitted(
            request.id,
            request.attempt,
            worker.ranks[sequence.dp_rank],
            request.num_emitted + start,
            progress.tokens,
            self._visits[sequence.key].cached_tokens,
            sequence.finish,
            tuple(sequence.logprobs),
        )
        sequence.logprobs.clear()
        worker.ports.transport.send(FRONTEND, emitted)
        if sequence.finish is not None:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        worker, request = self.worker, sequence.request
        dp_rank = sequence.dp_rank
        if 0 <= sequence.boundary == sequence.computed // worker.layout.block_tokens:
            sequence.stored.append((sequence.boundary, sequence.state_slot(sequence.boundary)))
            worker.commit(sequence)
        if sequence.lease is not None and sequence.lease.committed > request.num_tokens // worker.layout.block_tokens:
            worker.spiller.offer(sequence)  # the prefill rank has offered what the prompt fills
        worker.ports.transport.send(ROUTER, AttemptFinished(request.id, request.attempt, worker.ranks[dp_rank]))
        del self._visits[sequence.key]
        worker.end(sequence, "done")

    def on_given_up(self, sequence: Sequence, reason: str) -> None:
        dp_rank = sequence.dp_rank
        self._fail(sequence.key, None, dp_rank, reason)
        if not sequence.ended:
            self.worker.end(sequence, "aborted")
        self._visits.pop(sequence.key, None)

    # ------------------------------------------------------------ giving up

    def _on_abort(self, message: AbortAttempt) -> None:
        sequence = self.worker.sequences.get(message.key)
        if sequence is not None and not sequence.ended:
            self._abort(sequence)

    def _abort(self, sequence: Sequence) -> None:
        """End an attempt. If a prefill rank may still write to its blocks, they stay held until it says it will not."""
        visit = self._visits[sequence.key]
        dp_rank = sequence.dp_rank
        self.worker.queues[dp_rank].remove(sequence)
        if visit.exposed:
            sequence.holds += 1
        self.worker.end(sequence, "aborted")
        if visit.exposed:
            self._ask_pushes_ended(sequence)
        else:
            del self._visits[sequence.key]

    def _ask_pushes_ended(self, sequence: Sequence) -> None:
        """Ask the prefill rank to stop pushing; ask again until it has answered or is down."""
        dp_rank = sequence.dp_rank
        self._fail(sequence.key, sequence.placement.prefill.worker, dp_rank, "decode gave up", to_router=False)
        self.worker.set_alarm("fence", sequence)

    def _on_pushes_ended(self, message: PushesEnded) -> None:
        sequence, visit = self.worker.sequences.get(message.key), self._visits.get(message.key)
        if sequence is None or visit is None:
            return
        if not sequence.ended:
            if sequence.state not in ("reserved", "receiving"):
                return  # the hand-over came before; this is an answer to an older question
            visit.exposed = False
            self._abort(sequence)
        else:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """The fence of an ended sequence has fallen."""
        if sequence.ended and self._visits.pop(sequence.key, None) is not None:
            sequence.holds -= 1
            self.worker.forget(sequence)

    def _on_rank_down(self, message: RankDown) -> None:
        for sequence in [s for s in self.worker.sequences.values() if s.placement.prefill == message.rank]:
            visit = self._visits.get(sequence.key)
            if visit is None or not (visit.exposed or sequence.state == "reserved"):
                continue
            visit.exposed = False
            if sequence.ended:
                self._leave(sequence)
            else:
                self._abort(sequence)
                self._fail(sequence.key, None, sequence.dp_rank, f"{message.rank} is down")

    def _fail(
        self,
        key: Attempt,
        peer: str | None,
        dp_rank: int,
        reason: str,
        *,
        retry: bool = True,
        to_router: bool = True,
    ) -> None:
        failed = AttemptFailed(key[0], key[1], self.worker.ranks[dp_rank], reason, retry)
        if to_router:
            self.worker.ports.transport.send(ROUTER, failed)
        if peer is not None:
            self.worker.ports.transport.send(peer, failed)

    # ------------------------------------------------------------ deadlines

    def on_deadline(self, kind: str, key: Attempt) -> None:
        sequence, visit = self.worker.sequences.get(key), self._visits.get(key)
        if sequence is None or visit is None:
            return
        if kind == "fence" and sequence.ended and visit.exposed:
            self._ask_pushes_ended(sequence)
        elif kind == "receive" and sequence.state in ("reserved", "receiving"):
            self._abort(sequence)
            self._fail(key, None, sequence.dp_rank, "receive deadline")

    def check(self) -> None:
        """Raise InvariantError if a law does not hold on this worker."""
        self.worker.check()

    @property
    def is_quiet(self) -> bool:
        return self.worker.is_quiet and not self._visits
