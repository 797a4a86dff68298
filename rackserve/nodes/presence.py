"""Telling the router what a holder has: numbered events, and a snapshot when events were lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rackserve.base.ids import ROUTER, Rank
from rackserve.base.keys import Chain
from rackserve.base.messages import BlocksRemoved, BlocksStored, PresenceSnapshot
from rackserve.ports import Transport
from rackserve.runs.cache import Removed, Stored


class Announcer:
    """Numbers one holder's presence events and sends them to the router in order (laws I3-I5)."""

    def __init__(self, holder: Rank, transport: Transport, chains: Callable[[], Sequence[Chain]]) -> None:
        self.holder = holder
        self.number = 0
        self._transport = transport
        self._chains = chains

    def announce(self, events: Sequence[Stored | Removed]) -> None:
        """Send events that have already happened in the holder's cache."""
        for event in events:
            self.number += 1
            if isinstance(event, Stored):
                self._transport.send(ROUTER, BlocksStored(self.holder, self.number, event.chain, event.start))
            else:
                self._transport.send(ROUTER, BlocksRemoved(self.holder, self.number, event.chain, event.keep))

    def snapshot(self) -> None:
        """Send everything the holder has; its number is that of the last event it covers."""
        self._transport.send(ROUTER, PresenceSnapshot(self.holder, self.number, tuple(self._chains())))
