"""Where a request goes: the production placement over what workers publish, what was sent to them, and what is booked.

Nothing here waits or looks at a clock. The load of a rank is tokens of prefill: all uncached ones of a request until its first
byte, `running_tokens` from then to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rackserve.base.ids import Attempt, Rank
from rackserve.base.keys import Chain, count, prefix
from rackserve.base.messages import BlocksRemoved, BlocksStored
from rackserve.relay.config import RouteConfig
from rackserve.relay.prompts import Call
from rackserve.relay.records import PrefixRecords
from rackserve.relay.usage import Usage
from rackserve.route.cost import Candidate, uncached_work
from rackserve.route.index import PrefixIndex
from rackserve.route.limits import Refusal, admissible, no_room
from rackserve.route.load import LoadBook
from rackserve.route.placement import POLICIES, DecodeCandidate, place_decode
from rackserve.route.promises import Promises

NO_FETCH = 1.0
"""There is no pool between foreign workers, so nothing is ever fetched."""

UNKNOWN_CAPACITY = 1 << 40


@dataclass(slots=True)
class Booking:
    """A request's place, from its choice to its end.

    decode      where it is decoded, for a pair
    claimed     tokens that `rank` was believed to hold or to be computing
    held        blocks that it was believed to hold
    open        not yet released
    """

    key: Attempt
    rank: Rank
    decode: Rank | None
    call: Call
    claimed: int
    held: int
    begun: bool = False
    open: bool = field(default=True)


class Placer:
    """Books requests on ranks. `records` has those of ranks whose holdings are learned."""

    def __init__(self, config: RouteConfig) -> None:
        self.index = PrefixIndex(max_runs=config.router.max_index_runs)
        self.load = LoadBook()
        self.decode_load = LoadBook()
        self.promises = Promises()
        self.records: dict[Rank, PrefixRecords] = {}
        self._config = config
        self._capacity: dict[Rank, int] = {}
        self._policy = POLICIES[config.router.policy]()
        self._attempts = 0
        for worker in config.workers:
            for rank in worker.ranks:
                self._capacity[rank] = worker.capacity_tokens or UNKNOWN_CAPACITY
                if not worker.events and worker.role != "decode":
                    tokens = worker.capacity_tokens or config.records.tokens
                    self.records[rank] = PrefixRecords(
                        rank, max_blocks=tokens // config.key_tokens, age_ms=round(config.records.age * 1000)
                    )

    def place(self, call: Call, ranks: Sequence[Rank], decode: Sequence[Rank] | None = None) -> Booking | Refusal:
        """Choose among `ranks` (in order), and for a pair among `decode`, and book. A refusal books nothing."""
        held, coming = self.index.match(call.chain), self.promises.match(call.chain)
        candidates = [self._candidate(call, rank, max(held.get(rank, 0), coming.get(rank, 0))) for rank in ranks]
        roomy = admissible(self._config.router, candidates)
        if decode == []:
            return no_room(self._config.router, [], "decode worker")
        if not roomy:
            return no_room(self._config.router, candidates, "worker" if decode is None else "prefill worker")
        chosen = self._policy.place(call.session, roomy)
        target = None if decode is None else self._place_decode(call, decode)
        self._attempts += 1
        key = ("", self._attempts)
        self.load.book(chosen.rank, key, chosen.own_tokens)
        self.promises.add(chosen.rank, key, self._reusable(call))
        if target is not None:
            self.decode_load.book(target, key, call.tokens + call.max_tokens)
        return Booking(key, chosen.rank, target, call, chosen.local_tokens, held.get(chosen.rank, 0))

    def _candidate(self, call: Call, rank: Rank, blocks: int) -> Candidate:
        work = uncached_work(call.tokens, blocks * self._config.key_tokens, 0, NO_FETCH)
        return Candidate(rank, *work, *self.load.booked(rank))

    def _place_decode(self, call: Call, ranks: Sequence[Rank]) -> Rank:
        context = call.tokens + call.max_tokens
        candidates = [DecodeCandidate(rank, self._capacity[rank], self.decode_load.outstanding(rank)) for rank in ranks]
        chosen = place_decode(context, candidates) or min(candidates, key=lambda c: (c.booked_tokens, c.rank))
        return chosen.rank

    def _reusable(self, call: Call) -> Chain:
        return prefix(call.chain, max(0, call.tokens - 1) // self._config.key_tokens)

    def computed(self, booking: Booking, now_ms: int) -> None:
        """The prompt is computed: the first byte came, or a pair's prefill half answered."""
        if not booking.open or booking.begun:
            return
        booking.begun = True
        self.promises.remove(booking.rank, booking.key)
        if booking.decode is None:
            self.load.adjust(booking.rank, booking.key, self._config.running_tokens)
        else:
            self.load.release(booking.rank, booking.key)
        records = self.records.get(booking.rank)
        if records is not None:
            self._tell(records.note(booking.call.chain, now_ms))

    def move_decode(self, booking: Booking, ranks: Sequence[Rank]) -> bool:
        """Another of `ranks` is to decode; False if there is none."""
        if not ranks or booking.decode is None or not booking.open:
            return False
        self.decode_load.release(booking.decode, booking.key)
        booking.decode = self._place_decode(booking.call, ranks)
        self.decode_load.book(booking.decode, booking.key, booking.call.tokens + booking.call.max_tokens)
        return True

    def end(self, booking: Booking) -> bool:
        """The request has left its place, however. True the first time, in which everything booked is released."""
        if not booking.open:
            return False
        booking.open = False
        self.promises.remove(booking.rank, booking.key)
        self.load.release(booking.rank, booking.key)
        if booking.decode is not None:
            self.decode_load.release(booking.decode, booking.key)
        return True

    def learn(self, booking: Booking, usage: Usage, now_ms: int) -> None:
        """The answer told what was cached. If that is less than was recorded, what follows is gone; the prompt is there now."""
        records = self.records.get(booking.rank)
        if records is None or not booking.begun:
            return
        chain = booking.call.chain
        exact = booking.call.by_tokens
        found = usage.cached_tokens // self._config.key_tokens if exact else int(usage.share * count(chain))
        if found + 1 < min(booking.held, count(self._reusable(booking.call))):  # its blocks may be cut elsewhere than ours
            self._tell(records.correct(chain, found))
            self._tell(records.note(chain, now_ms))

    def forget(self, rank: Rank) -> None:
        """The rank's worker is gone; it would come back empty."""
        records = self.records.get(rank)
        if records is not None:
            self._tell(records.clear())

    def expire(self, now_ms: int) -> None:
        """Records that nobody used for long count no more."""
        for records in self.records.values():
            self._tell(records.expire(now_ms))

    def _tell(self, events: Sequence[BlocksStored | BlocksRemoved]) -> None:
        for event in events:
            self.index.apply(event)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is booked."""
        return self.load.is_idle() and self.decode_load.is_idle() and self.promises.is_empty()

    def check(self) -> None:
        """Raise InvariantError if index, load, promises or records are malformed."""
        self.index.check()
        self.load.check()
        self.decode_load.check()
        self.promises.check()
        for records in self.records.values():
            records.check()
