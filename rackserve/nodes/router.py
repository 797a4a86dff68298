"""The router: knows who holds what and who has how much to do, and places each attempt on the least uncached work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rackserve.base.errors import InvariantError
from rackserve.base.events import MessageDropped, RequestPlaced
from rackserve.base.ids import FRONTEND, POOL_RANK, ROUTER, Attempt, Rank
from rackserve.base.keys import prefix
from rackserve.base.messages import (
    AbortAttempt,
    AttemptFailed,
    AttemptFinished,
    AttemptLost,
    BlocksRemoved,
    BlocksStored,
    Message,
    Place,
    Placed,
    Prefill,
    PrefillFinished,
    PrefillProgressed,
    PrefillStarted,
    PresenceSnapshot,
    RankDown,
    RankUp,
    Refused,
    SnapshotWanted,
    Timeout,
)
from rackserve.base.request import Placement, Request
from rackserve.nodes.alarms import Alarms
from rackserve.nodes.deadlines import Deadlines
from rackserve.nodes.ports import Ports
from rackserve.route.cost import Candidate, uncached_work
from rackserve.route.index import PrefixIndex
from rackserve.route.limits import admissible, is_full, no_room
from rackserve.route.load import LoadBook
from rackserve.route.placement import POLICIES, DecodeCandidate, RouterConfig, place_decode
from rackserve.route.promises import Promises


@dataclass(frozen=True, slots=True)
class Capacity:
    """Tokens the ranks of each role hold, tokens of a block, and what fetching a token costs (see `route.cost`).

    replay_tokens   of each cached prefix so many tokens are computed again (see `KvLayout`)
    """

    prefill_tokens: int
    decode_tokens: int
    block_tokens: int
    fetch_cost: float
    replay_tokens: int = 0

    def saved_tokens(self, num_blocks: int) -> int:
        """Tokens that need not be computed if the first `num_blocks` blocks of a prompt are cached."""
        return max(0, num_blocks * self.block_tokens - self.replay_tokens)


class Router:
    """Node `router`."""

    def __init__(self, config: RouterConfig, capacity: Capacity, deadlines: Deadlines, ports: Ports) -> None:
        self.index = PrefixIndex(max_runs=config.max_index_runs)
        self.prefill_load = LoadBook()
        self.decode_load = LoadBook()
        self.promises = Promises()
        self._config = config
        # What was accepted once is not turned away for load: the client already reads its answer.
        self._unlimited = msgspec.structs.replace(config, max_queued_requests_per_rank=0, max_queued_tokens_per_rank=0)
        self._capacity = capacity
        self._deadlines = deadlines
        self._ports = ports
        self._policy = POLICIES[config.policy]()
        self._up: dict[str, dict[Rank, int]] = {"prefill": {}, "decode": {}}
        self._sorted: dict[str, list[Rank]] = {}
        self._placed: dict[Attempt, Placement] = {}
        self._alarms = Alarms(ports.clock, self._on_timeout)
        self._handlers: dict[type[Message], Callable[..., None]] = {
            Place: self._on_place,
            AbortAttempt: self._on_abort,
            PrefillStarted: self._on_prefill_started,
            PrefillProgressed: self._on_prefill_progressed,
            PrefillFinished: self._on_prefill_finished,
            AttemptFinished: self._on_attempt_finished,
            AttemptFailed: self._on_attempt_failed,
            BlocksStored: self._on_presence,
            BlocksRemoved: self._on_presence,
            PresenceSnapshot: self._on_presence,
            RankUp: self._on_rank_up,
            RankDown: self._on_rank_down,
            Timeout: lambda message: self._alarms.wake(),
        }

    def handle(self, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)

    @property
    def is_full(self) -> bool:
        """Whether a new request would be refused for load whatever it asks for, so that its prompt need not be read."""
        return is_full(self._config, [self.prefill_load.booked(rank) for rank in self._ranks("prefill")])

    # ------------------------------------------------------------ placing

    def _on_place(self, message: Place) -> None:
        request = message.request
        if request.key in self._placed:
            self._drop(message, "duplicate")
            return
        limits = self._config if request.attempt == 1 else self._unlimited
        held = self.index.match(request.chain)
        candidates = self._candidates(request, held)
        roomy = admissible(limits, candidates)
        refusal = self._impossible(request)
        if refusal is None and not roomy:
            full = no_room(limits, candidates)
            refusal = Refused(*request.key, full.code, full.detail, retry=True)
        elif refusal is None and not self._up["decode"]:
            refusal = Refused(*request.key, "unavailable", "no decode rank is up", retry=True)
        if refusal is not None:
            self._ports.transport.send(FRONTEND, refusal)
            return
        chosen = self._policy.place(request.session, roomy)
        placement = self._book(request, chosen, held)
        self._ports.recorder.record(
            RequestPlaced(
                request.id,
                request.attempt,
                placement.prefill,
                placement.decode,
                placement.cached_tokens,
                chosen.pool_tokens,
                chosen.queued_tokens,
                tuple((candidate.rank, candidate.cost) for candidate in candidates),
            )
        )
        self._ports.transport.send(FRONTEND, Placed(placement))
        self._ports.transport.send(placement.prefill.worker, Prefill(placement, request))
        due = self._ports.clock.now() + self._deadlines.ns("booking")
        self._alarms.set(due, Timeout("booking", request.id, request.attempt))

    def _impossible(self, request: Request) -> Refused | None:
        """A request that no rank could ever hold is refused at once."""
        total = request.num_tokens + request.max_tokens
        capacity = self._capacity
        if request.num_tokens <= capacity.prefill_tokens and total <= capacity.decode_tokens:
            return None
        detail = (
            f"prompt of {request.num_tokens} tokens plus {request.max_tokens} output tokens does not fit: a prefill rank holds "
            f"{capacity.prefill_tokens} tokens, a decode rank {capacity.decode_tokens}"
        )
        return Refused(*request.key, "too_large", detail, retry=False)

    def _candidates(self, request: Request, held: dict[Rank, int]) -> list[Candidate]:
        """Every prefill rank that is up, weighed for this request, in rank order. `held`: blocks of its chain by holder."""
        coming = self.promises.match(request.chain)
        saved, booked, cost = self._capacity.saved_tokens, self.prefill_load.booked, self._capacity.fetch_cost
        pool_tokens = saved(held.get(POOL_RANK, 0))
        works: dict[int, tuple[int, int, int]] = {}  # most ranks hold the same: nothing
        candidates = []
        for rank in self._ranks("prefill"):
            blocks = max(held.get(rank, 0), coming.get(rank, 0))
            work = works.get(blocks)
            if work is None:
                work = works[blocks] = uncached_work(request.num_tokens, saved(blocks), pool_tokens, cost)
            candidates.append(Candidate(rank, *work, *booked(rank)))
        return candidates

    def _ranks(self, role: str) -> list[Rank]:
        """The ranks of a role that are up, in order."""
        ranks = self._sorted.get(role)
        if ranks is None:
            ranks = self._sorted[role] = sorted(self._up[role])
        return ranks

    def _book(self, request: Request, chosen: Candidate, held: dict[Rank, int]) -> Placement:
        context = request.num_tokens + request.max_tokens
        candidates = [
            DecodeCandidate(
                rank,
                self._capacity.decode_tokens,
                self.decode_load.outstanding(rank),
                held.get(rank, 0) * self._capacity.block_tokens,
            )
            for rank in self._ranks("decode")
        ]
        # All full: the one that will be free first takes it, and the reservation waits there with a deadline.
        target = place_decode(context, candidates) or min(candidates, key=lambda c: (c.booked_tokens, c.rank))
        cached = chosen.local_tokens + chosen.pool_tokens
        placement = Placement(request.id, request.attempt, chosen.rank, target.rank, cached, chosen.own_tokens)
        self._placed[placement.key] = placement
        self.prefill_load.book(placement.prefill, placement.key, chosen.own_tokens)
        self.decode_load.book(placement.decode, placement.key, context)
        reusable = (request.num_tokens - 1) // self._capacity.block_tokens
        self.promises.add(placement.prefill, placement.key, prefix(request.chain, reusable))
        return placement

    # ------------------------------------------------------------ what becomes of it

    def _on_prefill_started(self, message: PrefillStarted) -> None:
        placement = self._live(message.key, message)
        if placement is not None:
            cached = message.cached_tokens - placement.cached_tokens
            outstanding = max(0, placement.booked_tokens - cached)
            self.prefill_load.adjust(message.rank, message.key, outstanding)

    def _on_prefill_progressed(self, message: PrefillProgressed) -> None:
        if self._live(message.key, message) is not None:
            self.prefill_load.progress(message.rank, message.key, message.computed_tokens)

    def _on_prefill_finished(self, message: PrefillFinished) -> None:
        if self._live(message.key, message) is not None:
            self._release_prefill(message.key, message.rank)

    def _on_attempt_finished(self, message: AttemptFinished) -> None:
        if self._live(message.key, message) is not None:
            self._close(message.key)

    def _on_attempt_failed(self, message: AttemptFailed) -> None:
        placement = self._live(message.key, message)
        if placement is None:
            return
        self._close(message.key)
        other = placement.decode if message.rank == placement.prefill else placement.prefill
        self._ports.transport.send(other.worker, AbortAttempt(*message.key, message.reason))
        if message.retry:
            self._ports.transport.send(FRONTEND, AttemptLost(*message.key, message.reason))
        else:
            self._ports.transport.send(FRONTEND, Refused(*message.key, "too_large", message.reason, retry=False))

    def _on_abort(self, message: AbortAttempt) -> None:
        placement = self._live(message.key, message)
        if placement is not None:
            self._close(message.key)
            self._abort_ranks(placement, message.reason)

    def _on_timeout(self, message: Timeout) -> None:
        placement = self._placed.get((message.key, message.attempt))
        if placement is not None:
            self._lose(placement, "booking deadline")

    def _abort_ranks(self, placement: Placement, reason: str) -> None:
        abort = AbortAttempt(*placement.key, reason)
        self._ports.transport.send(placement.prefill.worker, abort)
        self._ports.transport.send(placement.decode.worker, abort)

    def _close(self, key: Attempt) -> None:
        """The one place where bookings end (law I6)."""
        placement = self._placed.pop(key)
        self._alarms.clear(*key)
        self._release_prefill(key, placement.prefill)
        self.decode_load.release(placement.decode, key)

    def _release_prefill(self, key: Attempt, rank: Rank) -> None:
        self.prefill_load.release(rank, key)
        self.promises.remove(rank, key)

    # ------------------------------------------------------------ who is there, who has what

    def _on_presence(self, message: BlocksStored | BlocksRemoved | PresenceSnapshot) -> None:
        if not self.index.apply(message):
            self._ports.transport.send(message.holder.worker, SnapshotWanted(message.holder))

    def _on_rank_up(self, message: RankUp) -> None:
        self._up[message.role][message.rank] = message.incarnation
        self._sorted.clear()
        self.index.drop(message.rank)

    def _on_rank_down(self, message: RankDown) -> None:
        for ranks in self._up.values():
            if ranks.get(message.rank) == message.incarnation:
                del ranks[message.rank]
                self._sorted.clear()
        self.index.drop(message.rank)
        computing = set(self.prefill_load.attempts(message.rank))
        for key, placement in list(self._placed.items()):
            # An attempt whose prompt is computed outlives its prefill rank unless pushes were under way; the decode rank
            # knows that, and fails it.
            if placement.decode == message.rank or key in computing:
                self._lose(placement, f"{message.rank} is down")

    def _lose(self, placement: Placement, reason: str) -> None:
        self._close(placement.key)
        self._abort_ranks(placement, reason)
        self._ports.transport.send(FRONTEND, AttemptLost(*placement.key, reason))

    def _live(self, key: Attempt, message: Message) -> Placement | None:
        placement = self._placed.get(key)
        if placement is None:
            self._drop(message, "attempt is over")
        return placement

    def _drop(self, message: Message, reason: str) -> None:
        self._ports.recorder.record(MessageDropped(ROUTER, type(message).__name__, reason))

    def check(self) -> None:
        """Raise InvariantError if bookings and placements disagree (I6) or the index is malformed."""
        self.index.check()
        self.prefill_load.check()
        self.decode_load.check()
        self.promises.check()
        if len({request for request, _ in self._placed}) < len(self._placed):
            raise InvariantError(f"a request has two attempts under way: {sorted(self._placed)}")
        for role, book in (("prefill", self.prefill_load), ("decode", self.decode_load)):
            for rank in self._up[role]:
                for key in book.attempts(rank):
                    if key not in self._placed:
                        raise InvariantError(f"{key} is booked on {rank} but not placed")

    @property
    def is_quiet(self) -> bool:
        return not self._placed and self.prefill_load.is_idle() and self.decode_load.is_idle() and self.promises.is_empty()
