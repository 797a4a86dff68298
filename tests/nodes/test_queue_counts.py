"""Counts kept by put and take are those of counting everything anew."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.base.events import Event, QueueChanged
from rackserve.base.ids import Rank
from rackserve.nodes.queue_counts import QUEUED, RUNNING, QueueCounts
from tests.sched.desk import sequence_of

RANKS = [Rank("w", 0), Rank("w", 1)]


class Kept:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, QUEUED, RUNNING]), st.booleans()), max_size=30))
def test_what_is_recorded_is_what_counting_anew_gives(plan: list[tuple[int, int | None, bool]]) -> None:
    kept = Kept()
    counts = QueueCounts(RANKS, kept)
    naive: dict[int, int] = {}
    last = dict.fromkeys(RANKS, (0, 0))
    for number, which, record in plan:
        if which is None:
            naive.pop(number, None)
            counts.take(number)
        else:
            naive[number] = which
            counts.put(number, number % 2, which)
        if not record:
            continue
        before = len(kept.events)
        counts.record()
        expected = []
        for rank in RANKS:
            here = [kind for name, kind in naive.items() if name % 2 == rank.dp_rank]
            now = (here.count(QUEUED), here.count(RUNNING))
            if now != last[rank]:
                expected.append(QueueChanged(rank, *now))
                last[rank] = now
        assert kept.events[before:] == expected


def test_a_sequence_that_is_not_counted_is_noticed() -> None:
    counts = QueueCounts(RANKS, Kept())
    sequence = sequence_of(3, 8)
    counts.put(3, 1, QUEUED)
    counts.check([(1, sequence)])
    with pytest.raises(InvariantError, match="it has"):
        counts.check([(0, sequence)])
    sequence.sent_blocks = 2
    with pytest.raises(InvariantError, match="it has"):
        counts.check([(1, sequence)])
