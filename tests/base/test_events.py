"""Recorded events: a closed set of plain values."""

from __future__ import annotations

import typing

import msgspec

from rackserve.base.events import AnyEvent, Event, RankChanged, RequestPlaced
from rackserve.base.ids import Rank


def test_the_closed_set_names_every_event() -> None:
    assert set(typing.get_args(AnyEvent)) == set(Event.__subclasses__())


def test_events_come_back_equal_from_a_recording() -> None:
    costs = ((Rank("prefill0"), 12), (Rank("prefill1", 1), 40))
    placed = RequestPlaced("r", 1, Rank("prefill0"), Rank("decode0"), 8, 0, 4, costs)
    for event in (placed, RankChanged(Rank("prefill0"), "up", 2)):
        assert msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent) == event
