from __future__ import annotations

from rackserve.base.events import Event, QueueChanged, StepDone
from rackserve.base.ids import Rank
from rackserve.bench.idle import idle_while_others_queue
from rackserve.bench.records import recorded

P0, P1 = Rank("prefill0"), Rank("prefill1")


def step(rank: Rank, number: int, duration: int) -> Event:
    return StepDone(rank, number, 1, 0, 1, 1, 1, duration)


def idle(*events: tuple[int, Event]) -> dict[str, int]:
    return idle_while_others_queue(recorded((at, "x", event) for at, event in events), ["prefill0", "prefill1"])


def test_a_group_is_idle_only_between_steps_and_only_while_another_rank_queues() -> None:
    found = idle(
        (0, QueueChanged(P0, 2, 1)),
        (100, step(P0, 1, 100)),  # prefill0 works from 0 to 100
        (60, step(P1, 1, 30)),  # prefill1 from 30 to 60: idle for 30, then for 40
        (100, QueueChanged(P0, 0, 0)),
        (200, step(P0, 2, 50)),  # nobody queues any more
    )
    assert found == {"prefill0": 0, "prefill1": 70}


def test_a_groups_own_queue_does_not_make_it_idle() -> None:
    assert idle((0, QueueChanged(P0, 5, 0)), (50, QueueChanged(P0, 0, 0)))["prefill0"] == 0


def test_a_step_that_several_ranks_record_counts_once() -> None:
    other = Rank("prefill1", 1)
    found = idle(
        (0, QueueChanged(P0, 1, 0)), (40, step(P1, 1, 40)), (40, step(other, 1, 40)), (60, QueueChanged(P0, 0, 0))
    )  # fmt: skip
    assert found["prefill1"] == 20


def test_without_events_nobody_is_idle() -> None:
    assert idle() == {"prefill0": 0, "prefill1": 0}
