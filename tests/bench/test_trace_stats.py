from __future__ import annotations

import pytest

from rackserve.base.units import to_ns
from rackserve.bench.session import Subagent
from rackserve.bench.trace_stats import PUBLISHED, TraceStatistics
from tests.bench.toys import request, session


def figures(*sessions: object) -> dict[str, float]:
    statistics = TraceStatistics()
    for each in sessions:
        statistics.add(each)  # type: ignore[arg-type]
    rows = statistics.rows()
    assert [row.name for row in rows] == list(PUBLISHED)
    assert all(row.published == PUBLISHED[row.name] for row in rows)
    return {row.name: row.value for row in rows}


def test_figures_of_a_small_trace_are_those_counted_by_hand() -> None:
    sub = Subagent("x", to_ns(2), to_ns(9), (request(0, 1, (1, 9)), request(2, 1, (1, 9, 8))))
    found = figures(
        session("a", request(0, 1, (1, 2), 10), sub, request(11, 1, (1, 2, 3), 20), request(400, 1, (1, 4), 30)),
        session("b", request(0, 1, (1,), 40)),
    )
    assert found["requests per session, mean"] == 3
    assert found["main turns per session, mean"] == 2
    assert found["sessions with subagents"] == 0.5
    assert found["subagent requests, share of all"] == pytest.approx(2 / 6)
    assert found["input tokens, mean"] == pytest.approx((8 + 8 + 12 + 12 + 8 + 4) / 6)
    assert found["input tokens of subagents, p50"] == 10
    assert found["output tokens of main turns, p50"] == 25
    assert found["new tokens of main turns, mean"] == (4 + 4) / 2
    # new blocks in file order: 2, then 1 (9), then 1 (8), then 1 (3), then 1 (4); and 1 in the second session
    assert found["new tokens per request (infinite cache), mean"] == pytest.approx(7 * 4 / 6)
    assert found["ideal hit rate"] == pytest.approx(1 - 7 / 13)
    # within one conversation the subagent's first block is not shared with the root's
    assert found["ideal hit rate within one conversation"] == pytest.approx(1 - 8 / 13)
    assert found["pause between main turns in s, p50"] == (10 + 388) / 2
    assert found["pauses above 300 s, share"] == 0.5


def test_a_trace_without_subagents_or_second_turns_has_figures_all_the_same() -> None:
    found = figures(session("b", request(0, 1, (1,), 40)))
    assert found["ideal hit rate"] == 0
    assert found["pauses above 300 s, share"] == 0
