from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rackserve.base.errors import FileFormatError
from rackserve.bench.session import Session
from rackserve.bench.trace import read_sessions
from tests.bench.test_weka import document, entry

MOONCAKE = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]}
NATIVE = {"rackserve_trace": 1, "id": "n", "block_tokens": 4, "requests": []}


def read(path: Path, *documents: Any, name: str = "t.jsonl") -> list[Session]:
    file = path / name
    file.write_text("".join((d if isinstance(d, str) else json.dumps(d)) + "\n" for d in documents))
    return list(read_sessions(file))


def test_gzip_and_a_document_over_many_lines_and_a_directory_are_read(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(document(entry(0, [1]), id="b")).encode()))
    (tmp_path / "a.json").write_text(json.dumps(document(entry(0, [1])), indent=1))
    (tmp_path / "notes.txt").write_text("not a trace")
    assert [s.id for s in read_sessions(tmp_path)] == ["a", "b"]
    assert [s.id for s in read_sessions(tmp_path, limit=1)] == ["a"]


def test_the_format_is_seen_from_the_first_document_of_each_file(tmp_path: Path) -> None:
    read(tmp_path, document(entry(0, [1])), name="1.jsonl")
    read(tmp_path, MOONCAKE, MOONCAKE, name="2.jsonl")
    read(tmp_path, NATIVE, NATIVE | {"id": "m"}, name="3.jsonl")
    assert [s.id for s in read_sessions(tmp_path)] == ["a", "line000001", "line000002", "n", "m"]


@pytest.mark.parametrize(
    ("first", "bad", "says"),
    [
        (document(entry(0, [1])), document(entry(0, [1], out=-1)), "`out` at least 0"),
        (document(entry(0, [1])), '{"id": "a", "requests": [', "truncated"),
        (document(entry(0, [1])), '{"id": "a", "requests": ' + '[{"requests": ' * 5000, "recursion"),
        (MOONCAKE, MOONCAKE | {"input_length": 5000}, "do not match"),
        (NATIVE, NATIVE | {"extra": 1}, "unknown field `extra`"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, first: Any, bad: Any, says: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        read(tmp_path, first, bad)
    assert f"{tmp_path / 't.jsonl'}:2: " in str(caught.value)
    assert says in str(caught.value)


def test_a_missing_or_damaged_file_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"gone\.jsonl: cannot be read"):
        list(read_sessions(tmp_path / "gone.jsonl"))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(FileFormatError, match=r"cut\.gz: cannot be read"):
        list(read_sessions(tmp_path / "cut.gz"))
    (tmp_path / "one.json").write_text('{\n "id": "a",\n oops\n}\n')
    with pytest.raises(FileFormatError, match=r"one.json:3: not JSON"):
        list(read_sessions(tmp_path / "one.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileFormatError, match=r"holds no \.json"):
        list(read_sessions(tmp_path / "empty"))
    with pytest.raises(FileFormatError, match=r"t\.jsonl:1: "):
        read(tmp_path, "oops")
