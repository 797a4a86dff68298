from __future__ import annotations

from rackserve.bench.session import Subagent, requests_of, shared_ids
from tests.bench.toys import ids, request, session


def test_shared_ids_counts_the_common_prefix() -> None:
    for a in range(5):
        for b in range(5):
            left, right = [1, 2, 3, 4][:a], [1, 2, 9, 4][:b]
            naive = next((n for n, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(a, b))
            assert shared_ids(ids(*left), ids(*right)) == naive


def test_requests_come_in_file_order_those_of_subagents_included() -> None:
    made = session("a", request(0), Subagent("x", 0, 9, (request(1), Subagent("y", 0, 9, (request(2),)))), request(3))
    assert [r.at_ns // 10**9 for r in requests_of(made.entries)] == [0, 1, 2, 3]
    assert made.num_requests == 4
