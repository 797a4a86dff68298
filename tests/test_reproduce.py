from __future__ import annotations

import json
from pathlib import Path

import pytest

from rackserve.cli import main


def test_the_cost_models_figures_need_no_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "reproduction.md").read_text() == printed
    content = json.loads((tmp_path / "reproduction.json").read_bytes())
    assert content["runs"] == {} and content["score"]["num_simulated"] == 6


def test_a_trace_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--trace", str(tmp_path / "absent.jsonl")]) != 0
    assert "absent.jsonl" in capsys.readouterr().err
