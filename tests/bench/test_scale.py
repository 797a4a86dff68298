from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.units import to_ns
from rackserve.bench.scale import scale_sessions
from rackserve.bench.session import Session, Subagent, TraceRequest, requests_of
from tests.bench.toys import ids


def turn(at_s: float, blocks: int, outputs: int = 320, spare: int = 0) -> TraceRequest:
    return TraceRequest(to_ns(at_s), to_ns(2), blocks * 64 + spare, outputs, ids(*range(blocks)))


def test_blocks_outputs_and_times_are_divided() -> None:
    session = Session("a", 64, (turn(100, 10, 330, spare=40), turn(200, 10, 5)))
    [made] = scale_sessions([session], scale=32, time_scale=10).sessions
    assert made.block_tokens == 2
    first, second = requests_of(made.entries)
    assert (first.input_tokens, first.output_tokens, first.hash_ids) == (10 * 2 + 1, 10, ids(*range(10)))
    assert (first.at_ns, first.api_ns) == (to_ns(10), to_ns(0.2))
    assert second.output_tokens == 1, "an answer keeps at least one token"


def test_a_conversation_ends_where_its_context_no_longer_fits_and_the_rest_is_counted() -> None:
    sub = Subagent("x", to_ns(10), to_ns(50), (turn(0, 5), turn(10, 50), turn(20, 6)))
    late = Subagent("y", to_ns(80), to_ns(90), (turn(0, 5),))
    session = Session("a", 64, (turn(0, 10), sub, turn(60, 20), turn(70, 40), late, turn(99, 2)))
    made = scale_sessions([session, Session("b", 64, (turn(0, 99),))], scale=8, max_context=20 * 8 + 40)
    assert [s.id for s in made.sessions] == ["a"], "a session of which nothing fits is left out"
    assert [r.num_blocks for r in requests_of(made.sessions[0].entries)] == [10, 5, 20]
    assert (made.num_requests, made.num_cut_by_context, made.num_sessions_cut) == (3, 2 + 3 + 1, 2)
    [cut] = [entry for entry in made.sessions[0].entries if isinstance(entry, Subagent)]
    assert cut.end_ns == to_ns(12), "a cut subagent ends with its last kept turn, or its parent would wait for nothing"
    assert made.describe().endswith("; 2 sessions end early, leaving out 6 requests from where the context no longer fits")


def test_the_turn_limit_counts_turns_of_each_conversation() -> None:
    sub = Subagent("x", to_ns(10), to_ns(50), (turn(0, 5), turn(10, 6), turn(20, 7)))
    made = scale_sessions([Session("a", 64, (turn(0, 1), sub, turn(60, 2), turn(70, 3)))], max_turns=2)
    assert [r.num_blocks for r in requests_of(made.sessions[0].entries)] == [1, 5, 6, 2]
    assert (made.num_cut_by_turns, made.num_cut_by_context) == (2, 0)
    assert made.describe().endswith("; 1 session ends early, leaving out 2 requests beyond the turn limit")


def test_the_start_of_a_session_is_divided_too() -> None:
    late = Session("a", 64, (turn(0, 1),), start_ns=to_ns(30))
    assert scale_sessions([late], time_scale=10).sessions[0].start_ns == to_ns(3)


def test_a_scale_that_does_not_divide_the_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="divide the trace's block size 64"):
        scale_sessions([Session("a", 64, (turn(0, 1),))], scale=7)
    for wrong in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ConfigError, match="time_scale above 0"):
            scale_sessions([], time_scale=wrong)
    with pytest.raises(ConfigError, match="time_scale above 0"):
        scale_sessions([], time_scale=0)


def test_times_stretched_beyond_what_can_be_written_down_are_refused() -> None:
    request = TraceRequest(at_ns=10**18, api_ns=0, input_tokens=64, output_tokens=1, hash_ids=ids(1))
    session = Session("a", 64, (request,))
    assert scale_sessions([session]).num_requests == 1
    with pytest.raises(ConfigError, match=r"time scale of 0\.5 makes a pause longer than 1e\+09 s"):
        scale_sessions([session], time_scale=0.5)
