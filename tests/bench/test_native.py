from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rackserve.base.errors import FileFormatError
from rackserve.base.units import to_ns
from rackserve.bench.demo import demo_sessions
from rackserve.bench.native import parse_native, write_sessions
from rackserve.bench.session import Session, Subagent, TraceRequest
from rackserve.bench.trace import read_sessions
from tests.bench.toys import ids


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_written_sessions_are_read_back_equal(name: str, tmp_path: Path) -> None:
    sessions = list(demo_sessions())
    write_sessions(tmp_path / name, sessions)
    assert list(read_sessions(tmp_path / name)) == sessions
    raw = (tmp_path / name).read_bytes()
    assert (raw[:2] == b"\x1f\x8b") is name.endswith(".gz")


def test_shared_ids_go_on_from_line_to_line(tmp_path: Path) -> None:
    sessions = [
        Session("a", 4, (TraceRequest(0, 0, 8, 1, ids(0, 1)),), shared=True),
        Session("b", 4, (TraceRequest(to_ns(1.5), to_ns(2), 13, 1, ids(0, 1, 2), "m"),), shared=True),
    ]
    write_sessions(tmp_path / "t.jsonl", sessions)
    assert b'"keep":2,"new":[[2,1]]' in (tmp_path / "t.jsonl").read_bytes()
    assert list(read_sessions(tmp_path / "t.jsonl")) == sessions


def test_a_session_keeps_when_it_began(tmp_path: Path) -> None:
    late = Session("a", 4, (TraceRequest(0, 0, 8, 1, ids(0, 1)),), start_ns=to_ns(12.000000001))
    write_sessions(tmp_path / "t.jsonl", [late])
    assert list(read_sessions(tmp_path / "t.jsonl")) == [late]
    with pytest.raises(ValueError, match="`start` must be from 0"):
        parse_native(b'{"rackserve_trace": 1, "id": "s", "block_tokens": 4, "start": -1, "requests": []}', None)


def test_the_documented_line_means_what_the_document_says() -> None:
    raw = b"""{"rackserve_trace": 1, "id": "s1", "block_tokens": 64, "requests": [
        {"at": 0, "took": 3.5, "input": 150, "output": 20, "new": [[0, 2]]},
        {"agent": "a", "at": 4, "until": 60, "requests": [{"at": 0, "took": 1, "input": 64, "output": 5, "new": [[9, 1]]}]},
        {"at": 70, "took": 2, "input": 128, "output": 9, "keep": 0, "new": [[0, 2]]}]}"""
    session, following = parse_native(raw, None)
    assert following is None
    inner = (TraceRequest(0, to_ns(1), 64, 5, ids(9)),)
    assert session.entries[0] == TraceRequest(0, to_ns(3.5), 150, 20, ids(0, 1))
    assert session.entries[1] == Subagent("a", to_ns(4), to_ns(60), inner)
    assert session.entries[2] == TraceRequest(to_ns(70), to_ns(2), 128, 9, ids(0, 1))


HEAD = '{"rackserve_trace": 1, "id": "s", "block_tokens": 4, "requests": '


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (HEAD.replace("1", "2", 1) + "[]}", "Invalid enum value 2"),
        (HEAD.replace("4", "0", 1) + "[]}", "block size must be at least 1"),
        (HEAD + '[{"at": -1, "input": 4, "output": 1}]}', "requests[0]: `at` must be from 0"),
        (HEAD + '[{"at": 0, "input": 0, "output": 1}]}', "`input` must be at least 1"),
        (HEAD + '[{"at": 0, "input": 4, "output": 1, "keep": 2}]}', "2 ids cannot be kept of the 0 before"),
        (HEAD + '[{"at": 0, "input": 40, "output": 1}]}', "do not match a prompt of 40"),
        (HEAD + '[{"at": 0, "input": 4, "output": 1, "prompt": "secret"}]}', "unknown field `prompt`"),
    ],
)
def test_a_bad_line_says_what_is_wrong(raw: str, says: str) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)) as caught:
        parse_native(raw.encode(), None)
    assert says in str(caught.value)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be written"):
        write_sessions(tmp_path / "no" / "t.jsonl", [])
