"""One publisher's batches in order: what is missing is asked for again, and what cannot be had makes all before it void."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rackserve.live.kv_events import KvBatch, decode_batch
from rackserve.relay.ledger import BlockLedger
from rackserve.route.index import PrefixIndex


class EventFeed:
    """Applies the batches of one socket to `index`, through the `ledgers` of the ranks by number; `rank` is that of batches
    that name none of them.

    num_gaps      times batches were missing
    num_restarts  times the publisher began anew
    num_unread    events or batches that could not be read
    """

    __slots__ = ("_index", "_last_ts", "_ledgers", "_next", "_rank", "_told", "num_gaps", "num_restarts", "num_unread")

    def __init__(self, index: PrefixIndex, ledgers: Mapping[int, BlockLedger], rank: int) -> None:
        self._index = index
        self._ledgers = ledgers
        self._rank = rank
        self._told = {rank}  # ranks this socket has spoken of
        self._next = 0
        self._last_ts = float("-inf")
        self.num_gaps = 0
        self.num_restarts = 0
        self.num_unread = 0

    @property
    def wanted(self) -> int:
        """The number from which a replay is of use."""
        return self._next

    def take(self, number: int, payload: bytes) -> bool:
        """A batch as it was published. False: others before it are missing and it was not applied; replay from `wanted`, then
        give it to `accept`.
        """
        if number > self._next:
            self.num_gaps += 1
            return False
        self._apply(number, payload)
        return self._next > number

    def accept(self, number: int, payload: bytes) -> None:
        """A batch of a replay, or one before which nothing more can be had: what is missing by now is lost for good."""
        if number > self._next:
            self.void()
            self._next = number
        self._apply(number, payload)

    def void(self) -> None:
        """Nothing heard so far counts any more."""
        for rank in self._told:
            for change in self._ledgers[rank].reset():
                self._index.apply(change)

    def restart(self) -> None:
        """The publisher is gone; what comes next is numbered from 0."""
        self.void()
        self._next = 0

    def _apply(self, number: int, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except msgspec.DecodeError:
            self.num_unread += 1
            if number == self._next:
                self.void()  # whatever it said is lost
                self._next += 1
            return
        if number < self._next:
            if batch.ts <= self._last_ts:
                return  # seen before
            self.num_restarts += 1
            self.restart()
            if number:
                return  # what it said before is wanted first
        self._next, self._last_ts = number + 1, batch.ts
        self._read(batch)

    def _read(self, batch: KvBatch) -> None:
        self.num_unread += batch.num_unread
        rank = batch.dp_rank if batch.dp_rank in self._ledgers else self._rank
        assert rank is not None
        self._told.add(rank)
        for event in batch.events:
            for change in self._ledgers[rank].apply(event):
                self._index.apply(change)
