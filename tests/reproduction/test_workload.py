from __future__ import annotations

from pathlib import Path

import pytest

from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.bench.session import Session, TraceRequest, requests_of
from rackserve.bench.synth import synthesize
from rackserve.reproduction.workload import agent_sessions, coarsened

DEMO = Path(__file__).parent.parent.parent / "rackserve" / "bench" / "data" / "demo_sessions.jsonl.gz"


def ids(request: TraceRequest) -> list[int]:
    return memoryview(request.hash_ids).cast("i").tolist()


def test_larger_blocks_keep_prompts_and_share_what_whole_blocks_share() -> None:
    session = next(iter(synthesize(1, 7)))
    coarse = coarsened(session, 256)
    for fine, large in zip(requests_of(session.entries), requests_of(coarse.entries), strict=True):
        assert (large.input_tokens, large.output_tokens, large.at_ns) == (fine.input_tokens, fine.output_tokens, fine.at_ns)
        assert ids(large) == ids(fine)[3::4]
    assert coarse.block_tokens == 256


def test_blocks_that_do_not_divide_are_refused() -> None:
    session = Session("a", 64, ())
    for size in (100, 32):
        with pytest.raises(ConfigError, match="cannot be joined"):
            coarsened(session, size)


def test_sessions_come_from_a_trace_or_are_drawn() -> None:
    assert [session.id for session in agent_sessions(2, 256)] == ["synthetic00000", "synthetic00001"]
    assert len(agent_sessions(3, 256, DEMO)) == 3
    assert agent_sessions(2, 256) == agent_sessions(2, 256)


def test_a_trace_without_sessions_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(FileFormatError, match="empty"):
        agent_sessions(2, 256, tmp_path / "empty.jsonl")
