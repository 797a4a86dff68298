from __future__ import annotations

import json
from pathlib import Path

import pytest

from rackserve.cli import main

CUT = str(Path(__file__).parent / "data" / "silicon_cut.csv")
LINE = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'

REQUEST = '{"input_toks": 300, "output_toks": 4, "queued_ts": 9.5, "first_token_ts": 9.6, "last_token_ts": 9.7}\n'


def test_figures_and_what_is_missing_are_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, history = tmp_path / "trace.jsonl", tmp_path / "history.jsonl"
    trace.write_text(2 * LINE)
    requests = tmp_path / "requests.jsonl"
    requests.write_text(2 * REQUEST)
    for _ in range(2):
        assert (
            main(
                ["validate", "--silicon", CUT, "--mooncake", str(trace), "--requests", str(requests), "--history", str(history)]
            )
            == 0
        )
    printed = capsys.readouterr().out
    assert printed.count("not calibrated") == 10
    assert "published  0.40  ours 0.500" in printed and "not compared:" in printed
    kept = [json.loads(line) for line in history.read_text().splitlines()]
    first, second = ({key: part for key, part in line.items() if key != "revision"} for line in kept)
    assert first == second
    assert "figures the same, 0 moved" in printed
    assert kept[0]["requests"]["ttft"]["count"] == 2
    assert kept[0]["hits"][0]["ours"] == 0.5 and kept[0]["silicon"]["outcomes"]["used"] == 13


def test_nothing_to_compare_with_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate"]) != 0
    assert "--set-ups, --silicon FILE" in capsys.readouterr().err


def test_a_history_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--silicon", CUT, "--history", str(tmp_path)]) != 0
    assert "--history" in capsys.readouterr().err
