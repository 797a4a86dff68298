"""How a worker's blocks get into the pool: an ending sequence offers them, a grant names their slots, a transfer moves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rackserve.base.ids import POOL, Attempt
from rackserve.base.keys import prefix
from rackserve.base.messages import PoolCancel, PoolCommit, PoolGranted, PoolStore
from rackserve.kv.rank_cache import Lease
from rackserve.nodes.moves import pool_copies
from rackserve.sched.sequence import Sequence

if TYPE_CHECKING:
    from rackserve.nodes.worker import Worker

SPILL = "spill"
"""Kind of the deadline of an offer that the pool has not answered."""


@dataclass(slots=True)
class _Offer:
    """What the pool was asked to take, and has not answered.

    lease   keeps the offered prefix in the rank's cache, and the resume state at its end in its slot
    rest    lengths in blocks of shorter prefixes, each with a state at its end, to offer after this one
    after   grants up to this number belonged to what was offered before
    """

    sequence: Sequence
    lease: Lease
    rest: list[int]
    after: int


class Spiller:
    """Offers and transfers to the pool of one worker. `pool`: whether there is one."""

    def __init__(self, worker: Worker, *, pool: bool) -> None:
        self._worker = worker
        self._pool = pool
        self._offers: dict[Attempt, _Offer] = {}
        self._grants: set[int] = set()

    def offer(self, sequence: Sequence) -> None:
        """Offer the pool the committed blocks of a sequence that is about to end; they stay until that is settled.

        Where resume needs a stored state, prefixes are offered at whose ends there is one: blocks alone are of no use.
        """
        if self._pool and sequence.lease is not None and sequence.lease.committed:
            sequence.holds += 1
            self._offer_next(sequence, [sequence.lease.committed, *sequence.branched], 0)

    def _offer_next(self, sequence: Sequence, lengths: list[int], after: int) -> None:
        worker, request, dp_rank = self._worker, sequence.request, sequence.dp_rank
        cache = worker.caches[dp_rank]
        for at, length in enumerate(lengths):
            chain = prefix(sequence.chain, length)
            lease = cache.acquire(chain, length, 0, request.tenant) if cache.present(chain) == length else None
            if lease is None:
                continue
            if worker.layout.stores_state and lease.restore < 0:
                cache.release(lease)
                continue
            self._offers[sequence.key] = _Offer(sequence, lease, lengths[at + 1 :], after)
            has_state = lease.restore >= 0
            message = PoolStore(request.id, request.attempt, worker.ranks[dp_rank], chain, 0, has_state, request.tenant)
            worker.ports.transport.send(POOL, message)
            worker.set_alarm(SPILL, sequence, limit="lookup")
            return
        sequence.holds -= 1
        worker.forget(sequence)

    def on_granted(self, message: PoolGranted) -> None:
        worker, send = self._worker, self._worker.ports.transport.send
        if message.grant in self._grants:
            worker.drop(message, "grant is in use")
            return
        offer = self._offers.get(message.key)
        if message.grant and (offer is None or message.grant <= offer.after):
            send(POOL, PoolCancel(message.grant))
        elif offer is not None and not message.grant:
            self._settle(offer, offer.after)
        elif offer is not None:
            self._move(offer, message)

    def _move(self, offer: _Offer, granted: PoolGranted) -> None:
        worker, sequence = self._worker, offer.sequence
        del self._offers[sequence.key]
        self._grants.add(granted.grant)
        region = worker.region(sequence.dp_rank)
        blocks = sequence.block_table[granted.from_block : granted.from_block + len(granted.slots)]
        copies = pool_copies(region, blocks, granted.slots, "full", to_pool=True)
        if granted.window_slot is not None:
            copies += pool_copies(region, [offer.lease.restore], (granted.window_slot,), "window", to_pool=True)

        def on_end(finished: bool) -> None:
            self._grants.discard(granted.grant)
            worker.ports.transport.send(POOL, PoolCommit(granted.grant) if finished else PoolCancel(granted.grant))
            self._settle(offer, granted.grant)

        worker.moves.start("spill", sequence, copies, on_end)

    def _settle(self, offer: _Offer, after: int) -> None:
        """One offer is over: make the next."""
        sequence = offer.sequence
        self._offers.pop(sequence.key, None)
        self._worker.caches[sequence.dp_rank].release(offer.lease)
        self._offer_next(sequence, offer.rest, after)

    def give_up(self, key: Attempt) -> None:
        """The pool did not answer in time: nothing more of this attempt is offered."""
        offer = self._offers.get(key)
        if offer is not None:
            offer.rest.clear()
            self._settle(offer, offer.after)

    @property
    def is_quiet(self) -> bool:
        return not self._offers
