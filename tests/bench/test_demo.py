from __future__ import annotations

from rackserve.bench.demo import demo_sessions, demo_trace
from rackserve.bench.ideal import IdealCache
from rackserve.bench.session import requests_of
from rackserve.bench.streams import streams_of


def test_the_demo_fits_a_small_machine_and_is_mostly_reuse() -> None:
    trace = demo_trace()
    requests = [(s.id, r) for s in trace.sessions for r in requests_of(s.entries)]
    ideal = IdealCache(16)
    hits = sum(ideal.add_trace_blocks(name, r.hash_ids) * 2 for name, r in requests)
    prompt = sum(r.input_tokens for _, r in requests)
    assert (len(trace.sessions), len(requests), trace.num_cut_by_context) == (8, 94, 0)
    assert 50_000 < prompt < 100_000
    assert 5_000 < prompt - hits < 9_000
    assert 1_000 < sum(r.output_tokens for _, r in requests) < 2_000
    assert max(r.input_tokens + r.output_tokens for _, r in requests) < 1_200


def test_the_demo_has_subagents_that_run_at_once_and_are_joined() -> None:
    fans = [sum(stream.parent >= 0 for stream in streams_of(session)) for session in demo_sessions()]
    assert sorted(fans, reverse=True)[:2] == [3, 1]
    assert any(stream.join_turn >= 0 for session in demo_sessions() for stream in streams_of(session))
