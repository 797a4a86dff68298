from __future__ import annotations

import json
from pathlib import Path

import pytest

from rackserve.cli import main
from rackserve.reproduce import simulate_all
from rackserve.reproduction.workload import agent_sessions
from rackserve.simulated_rack import BLOCK_TOKENS, SimulatedSetup, simulate_rack

DEMO = Path(__file__).parent.parent / "rackserve" / "bench" / "data" / "demo_sessions.jsonl.gz"


def test_the_cost_models_figures_need_no_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "reproduction.md").read_text() == printed
    content = json.loads((tmp_path / "reproduction.json").read_bytes())
    assert content["runs"] == {} and content["score"]["num_simulated"] == 6


def test_processes_of_their_own_give_what_this_one_gives() -> None:
    setups = {
        str(number): SimulatedSetup(
            chip="vr", prefill_groups=1, concurrency=2, decode_ranks=1, decode_width=32, settle_s=1, window_s=3, seed=number
        )
        for number in (1, 2)
    }
    here = {name: simulate_rack(setup, agent_sessions(2, BLOCK_TOKENS, DEMO)) for name, setup in setups.items()}
    assert simulate_all(setups, DEMO, 2, 2) == here
    assert simulate_all({}, DEMO, 2, 2) == {}


def test_a_trace_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--trace", str(tmp_path / "absent.jsonl")]) != 0
    assert "absent.jsonl" in capsys.readouterr().err
