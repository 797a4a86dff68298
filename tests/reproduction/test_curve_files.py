from __future__ import annotations

from pathlib import Path

import pytest

from rackserve.bench.frontier import read_curve
from rackserve.cli import main
from rackserve.reproduction.curve_files import curve_of, write_curves
from rackserve.reproduction.setups import GB300_LANES, RUBIN_LANES, SLICE, all_setups
from tests.reproduction.runs import run

RUNS = {
    f"rubin-{RUBIN_LANES[0]}": run(interactivity_p90=500.0, total_per_gpu=1e6),
    f"rubin-{RUBIN_LANES[1]}": run(interactivity_p90=300.0, total_per_gpu=2e6),
    f"rubin-{RUBIN_LANES[2]}": run(interactivity_p90=None, total_per_gpu=0.0),
    f"gb300-{GB300_LANES[0]}": run(interactivity_p90=400.0, total_per_gpu=2e5),
    f"gb300-{GB300_LANES[1]}": run(interactivity_p90=300.0, total_per_gpu=1e6),
}


def test_a_point_counts_the_whole_rack_of_which_a_slice_was_run() -> None:
    curve = curve_of("rubin", all_setups(), RUNS)
    assert [point.concurrency for point in curve.points] == list(RUBIN_LANES[:2])
    assert {point.num_gpus for point in curve.points} == {72}
    assert curve.points[0].requests_per_s == pytest.approx(SLICE * 10)
    assert "not calibrated" in curve.trust


def test_compare_reads_both_curves_and_finds_their_ratio_at_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_curves(tmp_path, all_setups(), RUNS)
    assert read_curve(tmp_path / "gb300.json") == curve_of("gb300", all_setups(), RUNS)
    assert main(["compare", str(tmp_path / "rubin.json"), str(tmp_path / "gb300.json")]) == 0
    assert "gives 2 times the throughput per GPU" in " ".join(capsys.readouterr().out.split())


def test_without_points_nothing_is_written(tmp_path: Path) -> None:
    write_curves(tmp_path, all_setups(), {})
    assert list(tmp_path.iterdir()) == []
