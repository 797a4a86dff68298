from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rackserve.cli import main
from rackserve.simulated_rack import SimulatedSetup
from rackserve.whatif.runs import ResultRow, SessionSample, Workload
from tests.reproduction.runs import RUN


def test_the_cost_models_figures_need_no_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "reproduction.md").read_text() == printed
    content = json.loads((tmp_path / "reproduction.json").read_bytes())
    assert content["runs"] == {} and content["score"]["num_simulated"] == 6


def test_a_trace_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--trace", str(tmp_path / "absent.jsonl")]) != 0
    assert "absent.jsonl" in capsys.readouterr().err


def made_up(error: str) -> Callable[..., dict[SimulatedSetup, ResultRow]]:
    def run_all(setups: Iterable[SimulatedSetup], workload: Workload, *rest: object) -> dict[SimulatedSetup, ResultRow]:
        sample = {"s": SessionSample(9, 960, 40, 10, (1.0,), (2.0,))}
        return {setup: ResultRow(setup, workload, "0", None if error else RUN, (), sample, error) for setup in setups}

    return run_all


def test_pairs_run_under_every_seed_and_curves_under_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rackserve.reproduce.run_all", made_up(""))
    assert main(["reproduce", "--seeds", "3", "--bands", "--out", str(tmp_path)]) == 0
    assert "pairs under 3 seeds, curves under one" in capsys.readouterr().out
    content = json.loads((tmp_path / "reproduction.json").read_bytes())
    counts = {name: run["num_requests"] for name, run in content["runs"].items()}
    assert (
        counts["three-pool"] == 3 * RUN.num_requests and counts["three-pool-slow"] == counts["rubin-18000"] == RUN.num_requests
    )
    assert content["loads"]["three-pool"]["label"] in ("STABLE", "SATURATED", "OVERLOADED")
    assert {path.name for path in tmp_path.iterdir()} == {"gb300.json", "reproduction.json", "reproduction.md", "rubin.json"}


def test_a_set_up_that_cannot_run_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rackserve.reproduce.run_all", made_up("no room for experts"))
    assert main(["reproduce", "--seeds", "1"]) != 0
    assert "set-up three-pinned: no room for experts" in capsys.readouterr().err
