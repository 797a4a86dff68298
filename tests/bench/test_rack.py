from __future__ import annotations

import pytest

from rackserve.base import events as ev
from rackserve.base.ids import Rank
from rackserve.bench.rack import placeable, role_of, summarize_rack
from rackserve.bench.records import recorded

P0, P1, D0 = Rank("prefill0"), Rank("prefill1"), Rank("decode0")


def test_balance_idle_time_and_sources_come_from_the_events() -> None:
    events: list[ev.Event] = [
        ev.PrefillAdmitted("a", 1, P0, 100, 60, 10, 0),
        ev.PrefillAdmitted("b", 1, P0, 100, 0, 40, 0),
        ev.PrefillAdmitted("c", 1, P1, 100, 0, 70, 0),
        ev.StepDone(P0, 0, 30, 0, 0, 1, 1, 500),
        ev.StepDone(P0, 1, 0, 0, 0, 0, 0, 500, dummy=True),
        ev.StepDone(D0, 0, 1, 0, 0, 1, 1, 70),
        ev.QueueChanged(P0, 0, 1),
        ev.QueueChanged(D0, 0, 1),
        ev.TransferDone("fetch", P0, 4, 40, 9),
        ev.TransferDone("fetch", P0, 4, 40, 9, "failed"),
        ev.BlocksEvicted(P0, 3),
        ev.BlocksEvicted(P1, 4),
        ev.AttemptRetried("a", 2, "rank down"),
        ev.Preempted("a", 1, D0),
        ev.MessageDropped("router", "Placed", "stale"),
    ]
    rack = summarize_rack(recorded((n, "x", event) for n, event in enumerate(events)), 1000)
    assert (rack.local_tokens, rack.fetched_tokens, rack.uncached_tokens) == (60, 120, 120)
    assert rack.balance == pytest.approx(90 / 60)
    assert rack.lockstep_idle_share == 0.0, "nobody queued"
    assert [(rank.rank, rank.num_requests, rank.num_steps, rank.busy_ns) for rank in rack.ranks] == [
        ("decode0.0", 0, 1, 70), ("prefill0.0", 2, 1, 500), ("prefill1.0", 1, 0, 0)
    ]  # fmt: skip
    assert (rack.num_evicted_blocks, rack.num_retries, rack.num_preemptions, rack.num_dropped_messages) == (7, 1, 1, 1)
    assert rack.transfers == {"fetch failed": 1, "fetch finished": 1}


def test_without_events_figures_are_absent_not_zero() -> None:
    rack = summarize_rack([], 1000)
    assert (rack.balance, rack.lockstep_idle_share, rack.ranks) == (None, None, ())


def test_the_role_is_the_worker_without_its_number() -> None:
    assert (role_of("prefill12"), role_of("decode0")) == ("prefill", "decode")


def test_a_rank_that_never_ran_counts_in_balance_and_among_the_idle() -> None:
    costs = ((P0, 9), (P1, 99), (Rank("prefill2"), 7))
    events: list[ev.Event] = [
        ev.RequestPlaced("a", 1, P0, D0, 0, 0, 0, costs),
        ev.PrefillAdmitted("a", 1, P0, 90, 0, 0, 0),
        ev.QueueChanged(P0, 1, 0),
        ev.StepDone(P0, 0, 90, 0, 0, 1, 1, 0),
        ev.QueueChanged(P0, 0, 0),
    ]
    found = recorded((100 * n, "x", event) for n, event in enumerate(events))
    rack = summarize_rack(found, 400)
    assert rack.balance == pytest.approx(3.0) and [rank.rank for rank in rack.ranks] == [
        "decode0.0", "prefill0.0", "prefill1.0", "prefill2.0",
    ]  # fmt: skip
    assert rack.lockstep_idle_share == pytest.approx(2 * 200 / (400 * 3)), "two ranks idle while the first queued for 200 ns"
    assert placeable(found, "prefill") == {P0, P1, Rank("prefill2")} and placeable(found, "decode") == {D0}
