from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rackserve import __version__, what_if
from rackserve.bench.frontier import read_curve
from rackserve.cli import main
from rackserve.simulated_rack import SimulatedSetup
from rackserve.whatif import runs
from rackserve.whatif.runs import ResultRow, Workload
from tests.whatif.small import row

SMALL = ["--set", "settle_s=1", "--set", "window_s=60", "--sessions", "4", "--concurrency", "20", "--processes", "1"]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedSetup]:
    """Runs are made up: a pool does a quarter more, more sessions are served more slowly. The set-ups that were asked for."""
    asked: list[SimulatedSetup] = []

    def fake(setup: SimulatedSetup, workload: Workload) -> ResultRow:
        asked.append(setup)
        tokens = (1_250 if setup.pool else 1_000) * setup.concurrency
        found = row(setup, tokens, setup.concurrency / 10 + setup.seed / 1_000, busy=0.97 if setup.concurrency > 500 else 0.5)
        return msgspec.structs.replace(found, workload=workload, version=__version__)

    monkeypatch.setattr(runs, "run_setup", fake)
    return asked


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["sim", "--processes", "1", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_set_up_runs_and_its_waiting_times_have_a_label(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, *SMALL, "--out", str(tmp_path))
    assert code == 0 and "1 set-up x 1 seed; 4 drawn sessions; step times from the cost model, not calibrated" in out
    [line] = [line for line in out.splitlines() if line.startswith("*")]
    assert line.split()[1:3] == ["vr", "20"] and line.endswith("STABLE")
    assert "recommended" not in out and (tmp_path / "curves.html").exists()
    assert len(read_curve(tmp_path).points) == 1


def test_configurations_are_compared_over_five_paired_seeds(
    made_up: list[SimulatedSetup], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--grid", "pool=true,false", "--concurrency", "200,400", "--floor", "30", "--price", "4", "--out", str(tmp_path)]
    code, out, _ = run(capsys, *words)
    assert code == 0 and len(made_up) == 20 and {setup.seed for setup in made_up} == set(range(42, 47))
    assert "change against pool=true, in %, seed by seed" in out and "-20 [-20, -20] 5/5" in out
    assert "recommended at 30 tok/s/user by cost of a completed request: pool=true" in out
    assert "cost at 4 per GPU-hour" in out
    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert [point["pareto"] for point in summary["points"]] == [True, True, False, False]
    assert {point.label for point in read_curve(tmp_path).points} == {"pool=true", "pool=false"}
    page = (tmp_path / "curves.html").read_text()
    assert "pool=false over pool=true" in page and "SATURATED" not in page
    about = page.split("<h1>")[1].split("</header>")[0]
    assert "all set-ups: chip=vr prefill_groups=2 " in about and "not calibrated" in about, "which rack it shows"
    assert "pool=" not in about and "seed=" not in about and "concurrency=" not in about, "what differs stands at the points"
    again, _, progress = run(capsys, *words)
    assert again == 0 and len(made_up) == 20 and "simulated" not in progress, "nothing runs twice"


def test_a_sensitivity_analysis_says_whether_the_recommendation_holds(
    made_up: list[SimulatedSetup], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "--grid", "pool=true,false", "--sensitivity", "--seeds", "1", "--out", str(tmp_path))
    assert code == 0 and len(made_up) == 2 + 40
    assert out.rstrip().splitlines()[-2] == "the recommendation holds under every variation"
    assert all(point.coefficients is not None for point in read_curve(tmp_path).points)


def test_a_stopped_sweep_says_where_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def stop(*arguments: object) -> Callable[[], None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(what_if, "run_all", stop)
    code, _, errors = run(capsys, "--out", str(tmp_path))
    assert code == 130 and f"what was done is in {tmp_path / 'results.jsonl'}; the same command goes on there" in errors
    assert run(capsys)[2].startswith("stopped: nothing was kept (no --out)")


def test_a_set_up_without_a_result_is_an_exit_code_and_unknown_settings_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, *SMALL, "--set", "pool=false", "--set", "rank_cache_bytes=1e6", "--policy", "session_affinity")
    assert code == 1 and "no result for c=20: the rack never got warm" in out and "does not fit" in out
    code, _, errors = run(capsys, "--set", "decode_rank=2")
    assert code == 2 and "did you mean decode_ranks?" in errors


def test_a_set_up_file_is_a_curve(made_up: list[SimulatedSetup], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wide.toml").write_text("[setup]\npool = false\n[grid]\nconcurrency = [200, 600]\n")
    curve = what_if.simulated_curve(tmp_path / "wide.toml", 1)
    assert curve.name == "wide" and [point.concurrency for point in curve.points] == [200, 600]
    assert [point.saturation for point in curve.points] == ["STABLE", "SATURATED"]
    code, out, _ = run(capsys, "--config", str(tmp_path / "wide.toml"), "--set", "pool=true")
    assert code == 0 and "2 set-ups x 1 seed" in out and all(setup.pool for setup in made_up[2:])
