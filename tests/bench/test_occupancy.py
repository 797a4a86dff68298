from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base import events as ev
from rackserve.base.ids import Rank
from rackserve.bench.occupancy import busy_share, mean_batch, mean_waiting
from rackserve.bench.records import RecordedEvent

P0, P1, D0 = Rank("prefill0"), Rank("prefill1"), Rank("decode0")


def step(at: int, rank: Rank, number: int, duration: int, sequences: int = 1) -> RecordedEvent:
    return RecordedEvent(at, "x", ev.StepDone(rank, number, 1, 0, 0, sequences, 1, duration))


def test_a_group_step_counts_once_and_only_as_far_as_it_lies_in_the_window() -> None:
    twin = Rank("prefill0", 1)
    events = [step(110, P0, 1, 30), step(110, twin, 1, 30), step(150, P0, 2, 20), step(150, D0, 1, 40)]
    assert busy_share(events, ("prefill0", "prefill1"), 100, 200) == pytest.approx((10 + 20) / 200)


def test_batches_are_weighted_by_the_time_of_their_steps() -> None:
    events = [step(100, D0, 1, 30, sequences=4), step(110, D0, 2, 10, sequences=8), step(120, P0, 1, 50, sequences=99)]
    assert mean_batch(events, ("decode0",)) == pytest.approx((4 * 30 + 8 * 10) / 40)
    assert mean_batch([], ("decode0",)) == 0.0


CHANGES = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([P0, P1]), st.integers(0, 3)), max_size=8)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(CHANGES, st.integers(1, 5), st.integers(1, 40))
def test_waiting_prompts_per_part_are_those_of_every_nanosecond(
    changes: list[tuple[int, Rank, int]], num_parts: int, length: int
) -> None:
    ordered = sorted(changes, key=lambda change: change[0])
    events = [RecordedEvent(at, "x", ev.QueueChanged(rank, count, 0)) for at, rank, count in ordered if at <= length]
    found = mean_waiting(events, ("prefill0", "prefill1"), 0, length, num_parts)
    edges = [length * part // num_parts for part in range(num_parts + 1)]
    naive = []
    for low, high in pairwise(edges):
        total = 0
        for moment in range(low, high):
            queued: dict[Rank, int] = {}
            for item in events:
                if item.at_ns <= moment and isinstance(item.event, ev.QueueChanged):
                    queued[item.event.rank] = item.event.queued
            total += sum(queued.values())
        naive.append(total / (high - low) if high > low else 0.0)
    assert found == pytest.approx(naive)
