"""Presence events: numbered from one without gaps, and a snapshot that names the last of them."""

from __future__ import annotations

from rackserve.base.ids import ROUTER, Rank
from rackserve.base.messages import BlocksRemoved, BlocksStored, PresenceSnapshot
from rackserve.nodes.presence import Announcer
from rackserve.runs.cache import Removed, Stored
from tests.nodes.clock import Notes

RANK = Rank("prefill0", 1)


def test_events_are_numbered_from_one_in_the_order_they_happened() -> None:
    notes = Notes()
    announcer = Announcer(RANK, notes, list)
    announcer.announce([Stored(b"a" * 32, 1), Removed(b"a" * 32, 1)])
    announcer.announce([Stored(b"b" * 16, 0)])
    assert notes.sent == [
        (ROUTER, BlocksStored(RANK, 1, b"a" * 32, 1)),
        (ROUTER, BlocksRemoved(RANK, 2, b"a" * 32, 1)),
        (ROUTER, BlocksStored(RANK, 3, b"b" * 16, 0)),
    ]


def test_a_snapshot_says_which_event_it_includes() -> None:
    notes = Notes()
    announcer = Announcer(RANK, notes, lambda: [b"a" * 16])
    announcer.announce([Stored(b"a" * 16, 0)])
    announcer.snapshot()
    assert notes.sent[-1] == (ROUTER, PresenceSnapshot(RANK, 1, (b"a" * 16,)))
