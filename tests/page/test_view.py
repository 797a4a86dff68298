from __future__ import annotations

import pytest

from rackserve.base.events import (
    AnyEvent,
    DraftsVerified,
    FirstTokenSent,
    PrefillAdmitted,
    QueueChanged,
    RankChanged,
    RequestArrived,
    StepDone,
    TransferDone,
)
from rackserve.base.units import NS_PER_S
from rackserve.live.rank_spec import KvUse
from rackserve.live.recorder import Recorded
from rackserve.page.view import MAX_IN_WINDOW, NUM_SAMPLES, Flow, PoolView, RackView, Sample
from tests.page.rig import DECODE, POOL, PREFILL, RANKS, busy_second, ended, status

START = 7 * NS_PER_S


def told(*events: tuple[float, AnyEvent]) -> RackView:
    """A view that began at 0 s and was told each event at its second."""
    view = RackView(START)
    view.look = lambda: (RANKS, POOL)
    for second, event in events:
        view(Recorded(START + int(second * NS_PER_S), "node", event))
    return view


def at(second: float) -> int:
    return START + int(second * NS_PER_S)


def test_tokens_are_told_in_three_kinds_per_second_of_the_period() -> None:
    view = told(
        (0.1, PrefillAdmitted("a", 0, PREFILL, 100, 30, 50, 1)),
        (0.2, StepDone(DECODE, 1, 4, 1, 1, 4, 4, 1)),
        (1.9, DraftsVerified(DECODE, 4, (4, 4), (3, 1))),
        (2.1, StepDone(DECODE, 1, 4, 1, 1, 4, 6, 1)),
    )
    view.frame(at(4))
    assert list(view.samples) == [
        Sample(2.0, 4.0, 10.0, 40.0, 0.8, None, None, None),
        Sample(4.0, 3.0, 0.0, 0.0, None, None, None, None),
    ]


def test_the_window_has_the_requests_of_the_last_minute() -> None:
    view = told(
        (1, FirstTokenSent("a", 0, NS_PER_S)),
        (1, ended(total_s=2.5, ttft_s=0.5, prompt=1000, output=101)),  # 20 ms a token
        (31, FirstTokenSent("b", 0, 3 * NS_PER_S)),
        (31, ended(total_s=4.5, ttft_s=0.5, prompt=499, output=101)),  # 40 ms a token
    )
    view.frame(at(40))
    sample = view.samples[-1]
    assert sample.ttft == pytest.approx((2.0, 2.8))
    assert sample.speed == pytest.approx((1 / 0.030, 1 / 0.038))
    assert sample.point == pytest.approx((1 / 0.038, (1101 + 600) / 40 / 3))
    view.frame(at(80))
    later = view.samples[-1]
    assert later.ttft == (3.0, 3.0) and later.point == pytest.approx((25, 600 / 60 / 3))
    view.frame(at(100))
    assert (view.samples[-1].ttft, view.samples[-1].point) == (None, None)


def test_requests_without_a_second_token_have_no_speed_but_count_as_throughput() -> None:
    view = told((1, ended(output=1, prompt=99)), (1, ended(output=101, prompt=99)))
    view.frame(at(2))
    assert view.samples[-1].speed == (50.0, 50.0) and view.samples[-1].point == (50.0, 300 / 2 / 3)


def test_unfinished_requests_are_on_no_curve() -> None:
    view = told((1, type(ended())("r", "aborted", "cancelled", 1, 10, 0, 5, NS_PER_S, 2 * NS_PER_S)))
    view.frame(at(2))
    assert view.samples[-1].point is None


def test_transfers_are_told_by_kind_for_the_last_closed_period_and_failed_ones_are_not() -> None:
    view = told(
        (0.5, TransferDone("push", PREFILL, 1, 100, 1)),
        (0.6, TransferDone("push", PREFILL, 1, 300, 1)),
        (0.7, TransferDone("push", PREFILL, 1, 900, 1, "failed")),
    )
    assert view.frame(at(1)).flows["push"] == Flow(0.0, 0.0)
    frame = view.frame(at(2.5))
    assert frame.flows == {"push": Flow(1.0, 200.0), "fetch": Flow(0.0, 0.0), "spill": Flow(0.0, 0.0)}
    assert view.frame(at(4)).flows["push"] == Flow(0.0, 0.0)


def test_every_rank_is_shown_with_its_queue_and_one_that_is_not_up_has_none() -> None:
    view = told((1, QueueChanged(PREFILL, 3, 2)), (1, QueueChanged(DECODE, 0, 7)), (1.5, RankChanged(DECODE, "down", 1)))
    shown = [(rank.rank, rank.role, rank.state, rank.running, rank.queued, rank.kv) for rank in view.frame(at(2)).ranks]
    assert shown == [
        ("prefill0.0", "prefill", "up", 2, 3, (30, 70, 100)),
        ("prefill1.0", "prefill", "down", 0, 0, None),
        ("decode0.0", "decode", "up", 0, 0, (30, 70, 100)),
    ]


def test_each_rank_of_a_worker_is_one() -> None:
    view = told()
    view.look = lambda: ((status("decode0", "decode", kv=(KvUse(1, 2, 3), KvUse(4, 5, 6))),), None)
    frame = view.frame(at(1))
    assert [(rank.rank, rank.kv) for rank in frame.ranks] == [("decode0.0", (1, 2, 3)), ("decode0.1", (4, 5, 6))]
    assert frame.pool is None


def test_the_pool_is_shown_with_what_it_holds() -> None:
    assert told().frame(at(1)).pool == PoolView(cached=0, total=100, hits=700, misses=300)


def test_a_long_silence_leaves_as_many_samples_as_are_kept_each_in_its_place() -> None:
    view = told((1, PrefillAdmitted("a", 0, PREFILL, 100, 30, 50, 1)))
    view.frame(at(10**7 + 1))
    assert len(view.samples) == NUM_SAMPLES and {sample.output for sample in view.samples} == {0.0}
    times = [sample.t for sample in view.samples]
    assert times == [10**7 - 2 * n for n in reversed(range(NUM_SAMPLES))]


def test_memory_is_bounded_however_fast_the_rack_is() -> None:
    view = told(*[(0.5, event) for n in range(MAX_IN_WINDOW // 2) for event in (*busy_second(n), *busy_second(n), ended())])
    assert len(view._ended) == len(view._first) == MAX_IN_WINDOW


def test_events_that_come_late_count_in_the_open_period_and_others_not_at_all() -> None:
    view = told(
        (2.5, RequestArrived("a", "s", 1, 1)),
        (2.6, StepDone(DECODE, 1, 1, 1, 1, 1, 8, 1)),
        (1.5, StepDone(DECODE, 1, 1, 1, 1, 1, 2, 1)),
    )
    view.frame(at(4))
    assert [sample.output for sample in view.samples] == [0.0, 5.0]
