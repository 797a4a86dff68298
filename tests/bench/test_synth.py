from __future__ import annotations

from pathlib import Path

import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.rng import Stream
from rackserve.bench.native import write_sessions
from rackserve.bench.streams import streams_of
from rackserve.bench.synth import BLOCK_TOKENS, Recipe, Spread, synthesize
from rackserve.bench.trace import read_sessions
from rackserve.bench.trace_stats import TraceStatistics

LOOSE = {
    "main turns per session, p90",
    "input tokens of subagents, p90",
    "pause between main turns in s, mean",
    "pauses above 300 s, share",
}
"""Tails that a small sample or a log-normal gets only roughly."""


def test_a_sample_meets_the_published_statistics() -> None:
    statistics = TraceStatistics()
    for session in synthesize(150, seed=2):
        statistics.add(session)
    for row in statistics.rows():
        assert row.published is not None
        bound = 0.6 if row.name in LOOSE else 0.3
        assert abs(row.value / row.published - 1) < bound, row
        if "hit rate" in row.name:
            assert abs(row.value - row.published) < 0.006, row


def test_a_session_is_a_function_of_seed_and_number_alone() -> None:
    one = list(synthesize(4, seed=7))
    assert one[:2] == list(synthesize(2, seed=7))
    assert one[0] != next(synthesize(1, seed=8))
    assert len({session.id for session in one}) == 4


def test_sessions_are_what_a_trace_may_hold(tmp_path: Path) -> None:
    """Written and read again they are equal, which checks the chain of ids, the lengths and the times."""
    sessions = list(synthesize(8, seed=5))
    write_sessions(tmp_path / "t.jsonl.gz", sessions)
    assert list(read_sessions(tmp_path / "t.jsonl.gz")) == sessions
    turns = [turn for session in sessions for stream in streams_of(session) for turn in stream.turns]
    assert all(turn.input_tokens == turn.num_blocks * BLOCK_TOKENS <= Recipe().most_tokens + BLOCK_TOKENS for turn in turns)


def test_some_turns_wait_for_their_subagents_and_some_do_not() -> None:
    joins = {stream.join_turn >= 0 for session in synthesize(12, seed=1) for stream in streams_of(session)[1:]}
    assert joins == {True, False}


def test_all_subagents_of_a_session_begin_with_the_same_blocks_and_with_none_of_the_main_conversation() -> None:
    for session in synthesize(12, seed=1):
        main, *others = streams_of(session)
        begins = {other.turns[0].hash_ids[:1_600] for other in others}
        assert len(begins) <= 1
        assert main.turns[0].hash_ids[:4] not in {begin[:4] for begin in begins}


def test_a_spread_has_its_median_and_its_limit() -> None:
    stream, spread = Stream("test", 1), Spread(100, 1.0, 500)
    drawn = sorted(spread.draw(stream) for _ in range(2_001))
    assert drawn[1_000] == pytest.approx(100, rel=0.1)
    assert drawn[-1] == 500
    with pytest.raises(ConfigError, match="at least 1"):
        next(synthesize(0))
