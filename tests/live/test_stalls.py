from __future__ import annotations

import pytest

from rackserve.base.events import Event, QueueChanged, RankChanged, RequestArrived, RequestEnded, StepDone
from rackserve.base.ids import Rank
from rackserve.live.rank_spec import RankStatus
from rackserve.live.recorder import Recorded
from rackserve.live.stalls import Stall, StallWatch

SECOND = 10**9
PREFILL, DECODE, OTHER = Rank("prefill0"), Rank("decode0"), Rank("decode1")
ARRIVED = RequestArrived("r", "s", 10, 10)


def status(rank: Rank, beat_age: float = 0.1, step_age: float = -1.0) -> RankStatus:
    role = "prefill" if rank is PREFILL else "decode"
    return RankStatus(rank.worker, role, "up", 1, 1, 0, beat_age, step_age, 0)  # type: ignore[arg-type]


def step(rank: Rank, dummy: bool = False) -> StepDone:
    return StepDone(rank, 1, 1, 0, 0, 1, 1, 1, dummy=dummy)


def watch(*events: tuple[int, Event]) -> StallWatch:
    """A watch of ten seconds that saw these (second, event)."""
    made = StallWatch(10.0)
    for second, event in events:
        made(Recorded(second * SECOND, "x", event))
    return made


def look(made: StallWatch, second: int, *ranks: RankStatus) -> Stall | None:
    return made.look(ranks or (status(PREFILL), status(DECODE)), second * SECOND)


def test_work_without_a_step_for_longer_than_the_limit_is_stuck_with_its_age() -> None:
    made = watch((0, ARRIVED), (0, QueueChanged(DECODE, 1, 0)))
    assert look(made, 10) is None
    assert look(made, 11) == Stall("decode", 11.0)


def test_idle_is_never_stuck() -> None:
    made = watch(
        (0, ARRIVED),
        (0, QueueChanged(DECODE, 1, 0)),
        (1, QueueChanged(DECODE, 0, 0)),
        (1, RequestEnded("r", "finished", "stop", 1, 1, 0, 1, 1, 1)),
    )
    assert look(made, 100_000) is None and look(watch(), 100_000) is None


def test_steps_are_progress_but_those_without_work_of_the_rank_are_not() -> None:
    waiting = (0, QueueChanged(DECODE, 0, 3))
    assert look(watch(waiting, (9, step(DECODE))), 19) is None
    assert look(watch(waiting, (9, step(DECODE, dummy=True))), 19) == Stall("decode", 19.0)
    assert look(watch(waiting, (9, step(PREFILL))), 19) == Stall("decode", 19.0)
    assert look(watch(waiting, (9, step(DECODE)), (9, QueueChanged(DECODE, 0, 2))), 20) == Stall("decode", 11.0)


def test_a_long_step_of_a_living_rank_is_busy_and_of_a_silent_one_stuck() -> None:
    made = watch((0, QueueChanged(PREFILL, 0, 1)))
    assert look(made, 60, status(PREFILL, beat_age=0.4, step_age=60.0)) is None
    assert look(made, 60, status(PREFILL, beat_age=59.0, step_age=59.5)) == Stall("prefill", 60.0)


def test_a_role_is_stuck_when_all_its_ranks_with_work_are() -> None:
    made = watch((0, QueueChanged(DECODE, 1, 0)), (0, QueueChanged(OTHER, 1, 0)), (15, step(OTHER)))
    ranks = (status(DECODE), status(OTHER))
    assert look(made, 20, *ranks) is None and made.age_s(ranks[0], 20 * SECOND) == 20.0
    assert look(made, 26, *ranks) == Stall("decode", 26.0)


def test_a_rank_that_went_down_has_no_work_and_requests_that_nobody_has_are_stuck_in_placement() -> None:
    made = watch((0, ARRIVED), (0, QueueChanged(DECODE, 1, 0)), (5, RankChanged(DECODE, "down", 1)))
    assert look(made, 15) is None
    assert look(made, 16) == Stall("placement", 11.0)


@pytest.mark.parametrize("again", [True, False])
def test_the_age_begins_with_the_work(again: bool) -> None:
    events = [(0, QueueChanged(DECODE, 1, 0)), (1, QueueChanged(DECODE, 0, 0))] if again else []
    made = watch(*events, (100, QueueChanged(DECODE, 1, 0)))
    assert look(made, 105) is None
