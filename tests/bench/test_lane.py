from __future__ import annotations

import pytest

from rackserve.base.units import to_ns
from rackserve.bench.draw import start_share
from rackserve.bench.lane import Lane
from rackserve.bench.session import Subagent
from tests.bench.toys import request, session

SUB = Subagent("x", to_ns(12), to_ns(25), (request(0), request(10)))
TREE = session("a", request(5), request(10), SUB, request(30), request(85))


@pytest.mark.parametrize("number", range(12))
def test_the_starting_point_is_drawn_within_the_window_from_first_to_last_sending(number: int) -> None:
    lane = Lane(TREE, 0, 0)
    lane.move_to_start((0.25, 0.75), 42, number)
    assert lane.origin_ns == pytest.approx(to_ns(5 + 80 * (0.25 + 0.5 * start_share(42, "a", number))), abs=2)


def test_what_was_sent_before_the_point_is_primed_if_its_stream_goes_on() -> None:
    lane = Lane(TREE, 0, 0)
    assert lane.move_to_start((0.2, 0.2), 42, 0) == [0, 1], "at 21: the root and the subagent are under way"
    assert (lane.first, lane.open_streams()) == ([2, 1], [0, 1])
    lane = Lane(TREE, 0, 0)
    assert lane.move_to_start((0.3, 0.3), 42, 0) == [0], "at 29 the subagent had sent its last"
    assert (lane.first, lane.live, lane.open_streams()) == ([2, 2], {0}, [0])
    assert lane.open_joins(0, 2) == set()


def test_a_lane_knows_what_a_turn_spawns_and_waits_for() -> None:
    lane = Lane(TREE, 0, 0)
    assert (lane.spawned_by(0, 1), lane.spawned_by(0, 0)) == ([1], [])
    assert (lane.open_joins(0, 2), lane.open_joins(0, 3)) == ({1}, set())
    lane.live.discard(1)
    assert lane.open_joins(0, 2) == set()
    assert (lane.origin_ns, lane.open_streams()) == (to_ns(5), [0])


def test_a_resumed_lane_keeps_the_recordings_clock_and_a_new_one_the_pause() -> None:
    lane = Lane(TREE, 0, 0)
    lane.next[0] = 3
    assert lane.pause_ns(0, resumed=True) == to_ns(80)
    assert lane.pause_ns(0, resumed=False) == to_ns(85 - 31)
    lane.next[0] = 0
    assert lane.pause_ns(0, resumed=False) == 0
