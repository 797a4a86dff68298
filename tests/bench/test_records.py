from __future__ import annotations

from pathlib import Path

import pytest

from rackserve.base.errors import FileFormatError
from rackserve.base.events import QueueChanged, StepDone
from rackserve.base.ids import Rank
from rackserve.base.keys import CacheNamespace
from rackserve.bench.ideal import IdealCache
from rackserve.bench.plan import RequestKey, Send
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.records import OpenRecord, Recording, RequestRecord, RunInfo, read_recording, recorded, write_recording
from tests.bench.toys import request

RUN = RunInfo("a", "live", 2, 3, config={"route.policy": "least"})


def opened() -> OpenRecord:
    send = Send(RequestKey("a", 0, 0, 0), 5, request(0, blocks=(1, 2)), 4, True)
    made = RequestMaker(CacheNamespace("m", "r", 4, "l")).make(send)
    return OpenRecord(send, made, IdealCache(4), 7)


def test_a_record_keeps_planned_and_actual_times_and_counts() -> None:
    record = opened()
    record.add_chunk(20, 3)
    record.add_chunk(30, None)
    record.add_chunk(40, 2)
    done = record.close(41, prompt_tokens=8, cached_tokens=4, output_tokens=6)
    assert (done.due_ns, done.sent_ns, done.first_ns, done.last_ns, done.ended_ns) == (5, 7, 20, 40, 41)
    assert (done.planned_prompt_tokens, done.planned_output_tokens, done.received_tokens) == (8, 4, 5)
    assert (done.num_chunks, done.chunk_ns) == (3, (20, 30, 40))


def test_a_request_without_output_has_no_first_time() -> None:
    done = opened().close(9, error="timeout", detail="none came")
    assert (done.first_ns, done.last_ns, done.received_tokens, done.error) == (-1, -1, -1, "timeout")


def test_a_recording_reads_back_as_written(tmp_path: Path) -> None:
    events = recorded(
        [
            (5, "prefill0", StepDone(Rank("prefill0", 1), 3, 10, 20, 30, 2, 1, 99)),
            (6, "prefill0", QueueChanged(Rank("prefill0"), 7, 3)),
        ]
    )
    recording = Recording(RUN, (opened().close(9, error="timeout"), RequestRecord("x", "s", 1, 2, 3, 4, 5)), events)
    write_recording(tmp_path / "r.jsonl", recording)
    assert read_recording(tmp_path / "r.jsonl") == recording


def test_a_damaged_recording_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write_recording(path, Recording(RUN, (opened().close(9),)))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(FileFormatError, match=r"r\.jsonl:2: "):
        read_recording(path)
    path.write_text("")
    with pytest.raises(FileFormatError, match="no head line"):
        read_recording(path)
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_recording(tmp_path / "gone.jsonl")
