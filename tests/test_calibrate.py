from __future__ import annotations

from pathlib import Path

import pytest

from rackserve.base.costs import StepCost
from rackserve.base.events import StepDone
from rackserve.base.ids import Rank
from rackserve.bench.records import Recording, RunInfo, recorded, write_recording
from rackserve.calibrate import describe
from rackserve.cli import main
from rackserve.commands import read_costs


def recording(path: Path, count: int, host: str = "live") -> Path:
    """Steps of n tokens that take 2 ms + n x 50 us."""
    steps = [
        StepDone(Rank("prefill0"), number, 1 + number % 37, 0, 0, 1, 1, 2_000_000 + (1 + number % 37) * 50_000)
        for number in range(count)
    ]
    info = RunInfo("made up", host, 1, 1)
    write_recording(path, Recording(info, (), recorded((number, "prefill0", step) for number, step in enumerate(steps))))
    return path


def test_costs_of_a_recorded_run_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "costs.json"
    assert main(["calibrate", str(recording(tmp_path / "run.jsonl", 60)), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("prefill\n  step                     2000.000 us  fitted\n")
    assert "error on unseen steps: 0.0% at the median" in shown
    assert read_costs(str(out))["prefill"].per_token_ns == pytest.approx(50_000)


def test_a_run_with_too_few_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(recording(tmp_path / "run.jsonl", 5))]) == 2
    assert "no role ran 10 steps" in capsys.readouterr().err


def test_a_recording_of_the_simulator_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live, simulated = recording(tmp_path / "live.jsonl", 60), recording(tmp_path / "sim.jsonl", 60, "simulated")
    assert main(["calibrate", str(live), str(simulated)]) == 2
    assert f"{simulated}: was made by the simulator" in capsys.readouterr().err


def test_costs_without_held_out_steps_are_said_to_be_uncalibrated() -> None:
    assert describe(StepCost(1e6, 0, 0, 0, 0))[-1] == "not calibrated"
