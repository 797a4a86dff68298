from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rackserve import comparing
from rackserve.bench.frontier import Band, Curve, OperatingPoint, write_frontier
from rackserve.bench.metrics import Throughput
from rackserve.cli import main
from tests.report.pair import NEW, OLD


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    for curve in (NEW, OLD):
        write_frontier(tmp_path / f"{curve.name}.frontier.json", curve)
    return str(tmp_path / "new.frontier.json"), str(tmp_path / "old.frontier.json")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["compare", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def row(text: str, first: str) -> list[str]:
    """The cells of the printed row that begins with `first`."""
    [line] = [line for line in text.splitlines() if line.strip().startswith(first + " ")]
    return [cell.strip() for cell in line.split("│")]


def test_two_files_give_multiples_at_peak_and_at_the_speed_asked_for(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, *files, "--at", "387")
    assert code == 0 and "A = new, B = old; tokens/s per GPU, all three, cached input included" in out
    assert row(out, "387") == ["387", "1.7M", "29k", "58.6× !", "21.4 to ∞", "132", "67% / 3.1%"]
    assert row(out, "peak")[:4] == ["peak", "2.52M", "930k", "2.71×"]
    assert "2.71 x 67.5% / 3.1% = 58.6" in out and "Rule: interpolated on the upper-left Pareto frontier" in out


def test_the_result_is_written_as_a_file_and_a_page(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, *files, "--at", "387", "--out", str(tmp_path / "out"))
    document = msgspec.json.decode((tmp_path / "out" / "compare.json").read_bytes())
    assert document["peak_ratio"] == pytest.approx(2.71, abs=0.01) and "upper-left Pareto frontier" in document["rule"]
    assert "<h2>new over old</h2>" in (tmp_path / "out" / "compare.html").read_text(encoding="utf-8")


def test_prices_give_costs_of_three_kinds_of_tokens_and_of_a_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = Throughput(1000, 100, 10)
    point = OperatingPoint("x", 1, 50, 1110, parts=parts, num_gpus=4, requests_per_s=2)
    for name in ("p", "q"):
        write_frontier(tmp_path / name, Curve(name, (point,)))
    files = str(tmp_path / "p"), str(tmp_path / "q")
    _, out, _ = run(capsys, *files, "--price", "3.6", "7.2", "--requests-per-session", "50")
    costs = out.split("cost; for each kind of token the whole cost")[1]
    assert row(costs, "A")[1:] == ["50", "1", "10", "100", "0.002", "0.1"]
    assert row(costs, "B")[1:] == ["50", "2", "20", "200", "0.004", "0.2"]
    code, _, error = run(capsys, *files, "--price", "1", "2", "3")
    assert code == 2 and "--price: give one price per GPU-hour, or one for each curve, got 3" in error


def test_without_parts_and_rates_there_are_no_costs_and_it_says_so(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, *files, "--price", "5")
    assert "no costs: the files give neither the parts of the throughput nor requests/s" in out


def test_curves_of_one_name_are_told_apart_and_invalid_runs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = msgspec.structs.replace(OLD.points[0], valid=False)
    write_frontier(tmp_path / "x", Curve("same", OLD.points))
    write_frontier(tmp_path / "y", Curve("same", (bad, *NEW.points)))
    _, out, _ = run(capsys, str(tmp_path / "x"), str(tmp_path / "y"))
    assert "A = same (A), B = same (B)" in out
    assert "left out: same (B) wide, c = 12000: an invalid run" in out


def test_set_up_files_are_simulated_and_compared_like_results(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def simulated(path: str, num_processes: int) -> Curve:
        asked.append(f"{Path(path).name} in {num_processes}")
        return Curve("mine", tuple(msgspec.structs.replace(point, trust="not calibrated") for point in OLD.points))

    monkeypatch.setattr(comparing, "simulated_curve", simulated)
    (tmp_path / "mine.toml").write_text("[grid]\nconcurrency = [1, 2]\n")
    code, out, _ = run(capsys, files[0], str(tmp_path / "mine.toml"), "--processes", "3")
    assert code == 0 and asked == ["mine.toml in 3"]
    assert "A = new, B = mine" in out and "B is simulated: not calibrated" in out and row(out, "peak")[3] == "2.71×"


def test_bounds_of_one_seed_are_said_to_leave_out_the_spread_of_draws(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    band = Band((9, 11), (600, 1400))
    for seeds in (1, 5):
        write_frontier(
            tmp_path / f"{seeds}", Curve(f"s{seeds}", (OperatingPoint("x", 1, 10, 1000, seeds=band, num_seeds=seeds),))
        )
    one, five = str(tmp_path / "1"), str(tmp_path / "5")
    held = "the bounds hold the curves' tolerance (±2% of speed), not the spread of draws, which sim gave as up to ±40% of"
    assert f"One seed each: {held} A's throughput and ±40% of B's throughput." in run(capsys, one, one)[1]
    assert f"One seed for B: {held} B's throughput." in run(capsys, five, one)[1]
    assert "spread of draws" not in run(capsys, five, files[0])[1]


def test_what_cannot_be_compared_is_named(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, files[0], str(tmp_path / "nothing"))
    assert code == 3 and f"{tmp_path / 'nothing'}: cannot be read" in error
    code, _, error = run(capsys, *files, "--by", "output")
    assert code == 2 and "new: has no valid point with a throughput of output" in error
    (tmp_path / "file").write_text("")
    code, _, error = run(capsys, *files, "--out", str(tmp_path / "file"))
    assert code == 3 and "cannot be written" in error


def test_a_simulated_curve_is_never_compared_without_its_models_error(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guess = Curve("guess", tuple(msgspec.structs.replace(point, trust="not calibrated") for point in OLD.points))
    write_frontier(tmp_path / "guess", guess)
    _, out, _ = run(capsys, files[0], str(tmp_path / "guess"))
    assert "B is simulated: not calibrated" in out and "A is simulated" not in out
