from __future__ import annotations

from rackserve.base.units import to_ns
from rackserve.bench.session import Subagent
from rackserve.bench.streams import streams_of
from tests.bench.toys import request, session


def test_pauses_count_from_the_end_of_the_answer_before_and_are_never_negative() -> None:
    [root] = streams_of(session("a", request(0, 3), request(10, 2), request(11, 1)))
    assert root.gaps_ns == (0, to_ns(7), 0)


def test_a_later_turn_waits_for_a_subagent_that_had_ended_before_it() -> None:
    joined = Subagent("x", to_ns(5), to_ns(20), (request(1), request(4)))
    background = Subagent("y", to_ns(6), to_ns(99), (request(0),))
    streams = streams_of(session("a", request(0, 3), joined, background, request(19), request(20), request(30)))
    root, first, second = streams
    assert (root.parent, root.spawn_turn, root.join_turn) == (-1, -1, -1)
    assert (first.parent, first.spawn_turn, first.join_turn) == (0, 0, 2)
    assert first.gaps_ns == (to_ns(5 + 1 - 3), to_ns(2))
    assert first.starts_ns == (to_ns(6), to_ns(9))
    assert (second.spawn_turn, second.join_turn) == (0, -1)


def test_nested_subagents_hang_on_their_own_parent() -> None:
    inner = Subagent("in", to_ns(2), to_ns(3), (request(0, 1),))
    outer = Subagent("out", to_ns(10), to_ns(30), (request(0, 1), inner, request(5, 1)))
    _, middle, leaf = streams_of(session("a", request(0, 3), outer, request(40)))
    assert (middle.parent, middle.join_turn) == (0, 1)
    assert (leaf.parent, leaf.spawn_turn, leaf.join_turn) == (1, 0, 1)
    assert leaf.gaps_ns == (to_ns(1),)
    assert leaf.starts_ns == (to_ns(12),)


def test_subagents_before_the_first_turn_start_with_the_session() -> None:
    early = Subagent("x", to_ns(2), to_ns(4), (request(1),))
    root, sub = streams_of(session("a", early, request(5)))
    assert (sub.parent, sub.spawn_turn, sub.join_turn, sub.gaps_ns) == (0, -1, 0, (to_ns(3),))
    assert root.gaps_ns == (to_ns(5),)
    [only] = streams_of(session("b", early))
    assert (only.parent, only.gaps_ns) == (-1, (to_ns(3),))
