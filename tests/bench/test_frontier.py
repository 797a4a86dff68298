from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.bench.frontier import OperatingPoint, frontier, operating_point
from rackserve.bench.metrics import summarize
from rackserve.bench.records import RequestRecord, RunInfo


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_the_frontier_is_what_no_other_point_beats(pairs: list[tuple[int, int]]) -> None:
    points = [OperatingPoint("x", 1, x, y, 0, 0) for x, y in pairs]
    naive = {
        p for p in points
        if not any(q.interactivity >= p.interactivity and q.per_gpu >= p.per_gpu and q != p for q in points)
    }  # fmt: skip
    best = frontier(points)
    assert set(best) == naive
    assert len(best) == len(naive)
    assert list(best) == sorted(best, key=lambda p: p.interactivity)


def test_a_run_becomes_a_point_by_its_slow_tail() -> None:
    done = RequestRecord(
        "r", "s", 0, 0, 2_000_000_000, 10, 11, 1_000_000_000, 2_000_000_000, 10, 4, 11, num_chunks=11
    )  # 100 ms per token
    point = operating_point(summarize(RunInfo("a", "live", 3, 2), [done]))
    assert point == OperatingPoint("a", 3, 10.0, 21 / 4, 6 / 4, 11 / 4)
    assert operating_point(summarize(RunInfo("a", "live", 3, 2), [])) is None
