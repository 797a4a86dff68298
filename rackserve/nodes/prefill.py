"""A prefill worker: matches its cache, fetches what the pool has, computes the rest in chunks, pushes KV to a decode rank."""

from __future__ import annotations

from collections.abc import Callable

from rackserve.base.events import PrefillAdmitted
from rackserve.base.ids import FRONTEND, POOL, ROUTER, Attempt
from rackserve.base.keys import common_blocks, count, key_at, prefix
from rackserve.base.messages import (
    AbortAttempt,
    AttemptFailed,
    AttemptFinished,
    Message,
    PoolFound,
    PoolLookup,
    PoolRelease,
    Prefill,
    PrefillFinished,
    PrefillProgressed,
    PrefillStarted,
    PushesEnded,
    RankDown,
    Reserve,
    Reserved,
    TokensEmitted,
)
from rackserve.base.request import MAX_PROMPT_SCORES
from rackserve.base.units import blocks_for
from rackserve.nodes.handover import Errand, Pusher
from rackserve.nodes.moves import pool_copies
from rackserve.nodes.worker import Worker
from rackserve.pool.planner import FetchRates, plan_fetch
from rackserve.sched.scheduler import Progress
from rackserve.sched.sequence import Sequence


class PrefillNode:
    """Node of one prefill worker. `worker_of` builds the shared parts around this node as owner."""

    def __init__(self, worker_of: Callable[[PrefillNode], Worker], rates: FetchRates | None) -> None:
        self._rates = rates
        self.worker = worker_of(self)
        self._errands: dict[Attempt, Errand] = {}
        self._pusher = Pusher(self.worker, self._errands, self._give_up)
        self._handlers: dict[type[Message], Callable[..., None]] = self.worker.handlers | {
            Prefill: self._on_prefill,
            PoolFound: self._on_pool_found,
            Reserved: self._pusher.on_reserved,
            AbortAttempt: self._on_abort,
            AttemptFailed: self._on_peer_failed,
            RankDown: self._on_rank_down,
        }

    def handle(self, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)
            self.worker.pump()

    # ------------------------------------------------------------ arrival and admission

    def _on_prefill(self, message: Prefill) -> None:
        request, worker = message.request, self.worker
        if message.placement.key in worker.sequences:
            worker.drop(message, "duplicate")
            return
        dp_rank = message.placement.prefill.dp_rank
        needed = blocks_for(request.num_tokens, worker.layout.block_tokens)
        if dp_rank >= len(worker.ranks) or needed > worker.caches[dp_rank].num_blocks:
            self._fail(request.key, dp_rank % len(worker.ranks), f"the prompt needs {needed} blocks", retry=False)
            return
        if request.scores_prompt and request.num_tokens * (request.prompt_logprobs + 2) > MAX_PROMPT_SCORES:
            reason = f"prompt tokens times (prompt_logprobs + 2) may be {MAX_PROMPT_SCORES} at most"
            self._fail(request.key, dp_rank, reason, retry=False)
            return
        sequence = worker.open(request, message.placement, "queued", 1)
        now = worker.ports.clock.now()
        self._errands[sequence.key] = Errand(now)
        self.worker.set_alarm("queue", sequence)
        self.worker.enqueue(sequence)

    def admit(self, sequence: Sequence, dp_rank: int) -> bool | None:
        """True: it has its blocks now. False: they cannot be had yet. None: another sequence is computing its next block."""
        worker, cache, limit = self.worker, self.worker.caches[dp_rank], self._reusable(sequence)
        matched = cache.match(sequence.chain, limit)
        if self._waits_for_sibling(sequence, matched, dp_rank):
            return None
        present = cache.present(sequence.chain, limit)
        if not worker.acquire(sequence, dp_rank, matched, blocks_for(sequence.request.num_tokens, worker.layout.block_tokens)):
            return False
        self._resume(sequence, matched)
        self._errands[sequence.key].local = sequence.computed
        if present > matched:  # others have had these blocks, and none left a state where this one parts from them
            worker.want_state(sequence, present)
        return True

    def _resume(self, sequence: Sequence, num_blocks: int) -> None:
        """Go on behind the first `num_blocks` blocks, which are cached; if no state is stored, `replay_tokens` before."""
        cached, replay = num_blocks * self.worker.layout.block_tokens, self.worker.layout.replay_tokens
        sequence.computed = sequence.scheduled = max(0, cached - replay)
        sequence.replay_end = cached if replay else 0
        if sequence.lease is not None:
            for passed in [blocks for blocks in sequence.branches if blocks <= num_blocks]:
                cache = self.worker.caches[sequence.dp_rank]
                cache.free_window(sequence.lease, sequence.branches.pop(passed))

    def _reusable(self, sequence: Sequence) -> int:
        """Blocks of the prompt that need not be computed if they are had; its last token always is, as output starts there.

        None of one whose log-probabilities are wanted: they come of computing it.
        """
        if sequence.request.scores_prompt:
            return 0
        return (sequence.request.num_tokens - 1) // self.worker.layout.block_tokens

    def _waits_for_sibling(self, sequence: Sequence, matched: int, dp_rank: int) -> bool:
        """Whether an admitted sequence of this rank will yield the first block this one lacks: then computing it is waste.

        Where resume needs a stored state, that sequence is asked to leave one where the two part; if it is past that, no.
        """
        worker, chain = self.worker, sequence.chain
        limit = min(self._reusable(sequence), count(chain))
        if matched >= limit:
            return False
        wanted = key_at(chain, matched)
        for other in worker.active(dp_rank):
            if (
                other.lease is None
                or other.state == "pushing"
                or matched >= count(other.chain)
                or key_at(other.chain, matched) != wanted
            ):
                continue
            shared = min(limit, matched + common_blocks(chain, matched, other.chain, matched))
            if worker.layout.stores_state:
                if worker.want_state(other, shared):
                    return True
            elif other.lease.committed <= matched and shared * worker.layout.block_tokens > worker.layout.replay_tokens:
                return True
        return False

    def start(self, sequence: Sequence, dp_rank: int) -> None:
        """The sequence has its blocks: ask the pool for what is missing, or compute."""
        from_block = sequence.lease.matched if sequence.lease is not None else 0
        limit = self._reusable(sequence)
        if self._rates is None or from_block >= limit:
            self._ready(sequence)
            return
        sequence.move("fetching")
        request = sequence.request
        rank, chain = self.worker.ranks[dp_rank], prefix(sequence.chain, limit)
        self.worker.ports.transport.send(POOL, PoolLookup(request.id, request.attempt, rank, chain, from_block))
        self.worker.set_alarm("lookup", sequence)

    def _ready(self, sequence: Sequence) -> None:
        worker, errand = self.worker, self._errands[sequence.key]
        dp_rank = sequence.dp_rank
        request = sequence.request
        sequence.move("ready")
        worker.group.schedulers[dp_rank].add(sequence)
        waited = worker.ports.clock.now() - errand.arrived
        rank = worker.ranks[dp_rank]
        worker.ports.recorder.record(
            PrefillAdmitted(request.id, request.attempt, rank, request.num_tokens, errand.local, errand.fetched, waited)
        )
        cached = errand.local + errand.fetched
        if cached != sequence.placement.cached_tokens:
            worker.ports.transport.send(ROUTER, PrefillStarted(request.id, request.attempt, rank, cached))
        if request.max_tokens > 1:
            errand.reserve_sent = True
            decode = sequence.placement.decode.worker
            worker.ports.transport.send(decode, Reserve(sequence.placement, request))

    # ------------------------------------------------------------ fetching

    def _on_pool_found(self, message: PoolFound) -> None:
        worker = self.worker
        sequence, errand = worker.sequences.get(message.key), self._errands.get(message.key)
        if sequence is None or errand is None or sequence.state != "fetching" or errand.pool_lease:
            if message.lease and not (errand and errand.pool_lease == message.lease):
                worker.ports.transport.send(POOL, PoolRelease(message.lease))
            worker.drop(message, "not waiting for it")
            return
        wanted = 0
        if message.lease and self._rates is not None:
            block_tokens = worker.layout.block_tokens
            found = message.from_block + len(message.slots)
            wanted = plan_fetch(message.from_block, found, block_tokens, self._rates, worker.layout.replay_tokens)
        if not wanted:
            if message.lease:
                worker.ports.transport.send(POOL, PoolRelease(message.lease))
            self._ready(sequence)
            return
        self._fetch(sequence, errand, message, wanted)

    def _fetch(self, sequence: Sequence, errand: Errand, found: PoolFound, num_blocks: int) -> None:
        worker = self.worker
        first = found.from_block
        errand.pool_lease = found.lease
        region = worker.region(sequence.dp_rank)
        copies = pool_copies(
            region, sequence.block_table[first : first + num_blocks], found.slots[:num_blocks], "full", to_pool=False
        )
        cache, lease, state = worker.caches[sequence.dp_rank], sequence.lease, sequence.end_slot
        if found.window_slot is not None and lease is not None:
            spare = cache.allocate_window(lease)  # to keep it for others too; the other slot only lends itself
            state = sequence.end_slot if spare is None else spare
            copies += pool_copies(region, [state], (found.window_slot,), "window", to_pool=False)
        has_state = found.window_slot is not None or not worker.layout.stores_state

        def on_end(finished: bool) -> None:
            worker.ports.transport.send(POOL, PoolRelease(found.lease))
            errand.pool_lease = 0
            if sequence.ended:
                return
            if finished and has_state:
                self._resume(sequence, first + num_blocks)
                errand.fetched = sequence.computed - errand.local
                if state != sequence.end_slot:
                    sequence.stored.append((first + num_blocks, state))
                worker.commit(sequence)
                if found.window_slot is not None and lease is not None:
                    sequence.restore = state if state == sequence.end_slot else cache.state_slot(lease)
            self._ready(sequence)
            worker.on_room(sequence.dp_rank)  # siblings may have waited for these blocks

        worker.moves.start("fetch", sequence, copies, on_end)

    # ------------------------------------------------------------ computing

    def on_progress(self, progress: Progress) -> None:
        worker, sequence = self.worker, progress.sequence
        errand = self._errands[sequence.key]
        request, rank = sequence.request, worker.ranks[sequence.dp_rank]
        worker.commit(sequence)
        if progress.tokens or sequence.finish is not None:
            self._computed(sequence, errand, progress.tokens)
        else:
            done = PrefillProgressed(request.id, request.attempt, rank, progress.num_computed)
            worker.ports.transport.send(ROUTER, done)
        self._pusher.push(sequence, errand)
        worker.on_room(sequence.dp_rank)  # siblings may have waited for these blocks

    def _computed(self, sequence: Sequence, errand: Errand, tokens: tuple[int, ...]) -> None:
        """The prompt is computed and the first token drawn."""
        worker, request = self.worker, sequence.request
        rank = worker.ranks[sequence.dp_rank]
        send = worker.ports.transport.send
        emitted = TokensEmitted(
            request.id,
            request.attempt,
            rank,
            request.num_emitted,
            tokens,
            errand.local + errand.fetched,
            sequence.finish,
            tuple(sequence.logprobs),
            tuple(sequence.prompt_logprobs),
        )
        send(FRONTEND, emitted)
        worker.spiller.offer(sequence)
        if sequence.finish is not None:
            send(ROUTER, AttemptFinished(request.id, request.attempt, rank))
            worker.moves.cancel_all(sequence, "push")
            worker.end(sequence, "done")
            self._pusher.report_ended(sequence, errand)
            return
        errand.first_tokens = tokens
        send(ROUTER, PrefillFinished(request.id, request.attempt, rank))
        worker.leave(sequence, "pushing")
        self.worker.set_alarm("handover", sequence)

    def on_given_up(self, sequence: Sequence, reason: str) -> None:
        self._give_up(sequence, reason)

    # ------------------------------------------------------------ giving up

    def _on_abort(self, message: AbortAttempt) -> None:
        sequence = self.worker.sequences.get(message.key)
        if sequence is not None and not sequence.ended:
            self._abort(sequence)

    def _on_peer_failed(self, message: AttemptFailed) -> None:
        """The decode rank gave the attempt up (it has told the router too)."""
        sequence, errand = self.worker.sequences.get(message.key), self._errands.get(message.key)
        if sequence is not None and not sequence.ended:
            self._abort(sequence)
        elif errand is None:
            ended = PushesEnded(message.request, message.attempt)
            self.worker.ports.transport.send(message.rank.worker, ended)
        elif sequence is not None:
            self._pusher.report_ended(sequence, errand)

    def _on_rank_down(self, message: RankDown) -> None:
        for sequence in [s for s in self.worker.sequences.values() if s.placement.decode == message.rank and not s.ended]:
            self._give_up(sequence, f"{message.rank} is down")

    def _abort(self, sequence: Sequence) -> None:
        """Stop everything for an attempt; what still touches its blocks is waited for before they are given back."""
        dp_rank = sequence.dp_rank
        self.worker.queues[dp_rank].remove(sequence)
        errand = self._errands.get(sequence.key)
        self.worker.moves.cancel_all(sequence, "fetch")
        self.worker.moves.cancel_all(sequence, "push")
        if not sequence.ended:
            self.worker.end(sequence, "aborted")
        if errand is not None:
            self._pusher.report_ended(sequence, errand)
        self.worker.on_room(dp_rank)

    def _give_up(self, sequence: Sequence, reason: str) -> None:
        self._abort(sequence)
        self._fail(sequence.key, sequence.dp_rank, reason)

    def _fail(self, key: Attempt, dp_rank: int, reason: str, *, retry: bool = True) -> None:
        failed = AttemptFailed(key[0], key[1], self.worker.ranks[dp_rank], reason, retry)
        self.worker.ports.transport.send(ROUTER, failed)

    def on_deadline(self, kind: str, key: Attempt) -> None:
        sequence, errand = self.worker.sequences.get(key), self._errands.get(key)
        if sequence is None or errand is None or sequence.ended:
            return
        if kind == "lookup":
            if sequence.state == "fetching" and not errand.pool_lease:
                self._ready(sequence)  # the pool does not answer: compute
        elif kind == {"queued": "queue", "pushing": "handover"}.get(sequence.state):
            self._give_up(sequence, f"{kind} deadline")

    def reservations(self) -> list[tuple[Sequence, Reserved]]:
        """Where this worker may still push to: each reservation it was told of and has neither used up nor given back."""
        found = [(self.worker.sequences[key], errand.reserved) for key, errand in self._errands.items()]
        return [(sequence, reserved) for sequence, reserved in found if reserved is not None]

    def check(self) -> None:
        """Raise InvariantError if a law does not hold on this worker."""
        self.worker.check()

    @property
    def is_quiet(self) -> bool:
        return self.worker.is_quiet and not self._errands
