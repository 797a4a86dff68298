from __future__ import annotations

import argparse
import signal
from pathlib import Path

import msgspec
import pytest

from rackserve.base.costs import StepCost
from rackserve.base.errors import FileFormatError, InvariantError, ResourceError
from rackserve.bench.demo import demo_sessions
from rackserve.bench.records import read_recording
from rackserve.cli import main, parser
from rackserve.commands import link_of, read_costs, read_trace, write_costs, write_run
from rackserve.config import Settings, load_settings
from rackserve.replay import ASSUMED_COSTS
from rackserve.report.compare import Arm

DIGEST = ["--set", "runner.kind=digest"]
SMALL = ["--limit", "1", "--max-turns", "3"]


def simulate_options(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["simulate", *arguments])


# ---------------------------------------------------------------- serve


@pytest.mark.parametrize(("model", "kind", "windows"), [("golden", "deepseek_v41", True), ("embedded", "llama", False)])
def test_the_model_named_says_of_which_kind_it_is_and_what_slots_it_needs(
    model: str, kind: str, windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Settings] = []

    async def serve(settings: Settings, events: str | None, traffic: object) -> int:
        served.append(settings)
        return 0

    monkeypatch.setattr("rackserve.commands._serve", serve)
    assert main(["serve", "--model", model, "--set", "runner.kind=digest"]) == 0
    assert (served[0].runner.model, served[0].runner.kind) == (model, kind)
    assert (served[0].topology.rank_windows > 0) is (served[0].topology.segment_windows > 0) is windows


# ---------------------------------------------------------------- traces


def test_without_a_trace_the_shipped_sessions_are_read() -> None:
    trace = read_trace(simulate_options())
    assert len(trace.sessions) == len(demo_sessions())
    assert len(read_trace(simulate_options("--limit", "2")).sessions) == 2


def test_limits_that_leave_nothing_are_an_error() -> None:
    with pytest.raises(FileFormatError, match=r"^trace: no session is left to replay; raise --max-context"):
        read_trace(simulate_options("--max-context", "1"))


# ---------------------------------------------------------------- simulate


def test_a_simulation_tells_its_settings_and_seed_first_and_leaves_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "here"
    assert main(["simulate", *DIGEST, *SMALL, "--set", "seed=7", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("settings") and "  seed: 7" in lines
    assert any(line.startswith("  runner: ") and ' kind="digest" ' in line for line in lines)
    assert any("not calibrated" in line for line in lines)
    (trace_line,) = (line for line in lines if line.startswith("trace: 1 sessions"))
    assert trace_line.endswith("seed 7") and lines.index(trace_line) > lines.index("  seed: 7")
    assert lines[-1] == f"report: {out / 'report.html'}"
    recording = read_recording(out / "simulated-rack.jsonl")
    assert recording.run.seed == 7 and recording.requests and recording.events
    assert {path.name for path in out.iterdir()} == {"report.html", "simulated-rack.jsonl", "simulated-rack.summary.json"}


def test_the_same_simulation_twice_writes_the_same_recording(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["simulate", *DIGEST, *SMALL, "--serial", "--out", str(tmp_path / name)]) == 0
    one, two = ((tmp_path / name / "simulated-rack.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two


def test_an_exported_simulation_replays_to_the_same_times(tmp_path: Path) -> None:
    trace, same = str(tmp_path / "sent.jsonl"), ["--scale", "1", "--time-scale", "1"]
    assert main(["simulate", *DIGEST, *SMALL, "--export", trace, "--out", str(tmp_path / "one")]) == 0
    assert main(["simulate", *DIGEST, "--trace", trace, *same, "--out", str(tmp_path / "two")]) == 0
    one, two = (read_recording(tmp_path / name / "simulated-rack.jsonl").requests for name in ("one", "two"))
    assert one == two and len(one) > 5


def test_a_simulation_can_use_the_costs_of_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = {role: msgspec.structs.replace(cost, held_out_error=0.25) for role, cost in ASSUMED_COSTS.items()}
    write_costs(tmp_path, costs)
    assert read_costs(str(tmp_path / "costs.json")) == costs
    assert main(["simulate", *DIGEST, *SMALL, "--costs", str(tmp_path / "costs.json")]) == 0
    out = capsys.readouterr().out
    assert "25.0%" in out and "assumed" not in out


def test_a_costs_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(FileFormatError, match=r"costs\.json: cannot be read"):
        read_costs(str(path))
    path.write_text('{"prefill": 3}')
    with pytest.raises(FileFormatError, match=r"costs\.json: not a costs file .*; a demo writes one"):
        read_costs(str(path))


def test_prompts_without_room_are_named_with_the_setting_that_gives_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *DIGEST, *SMALL, "--set", "topology.prefill_blocks=12"]) == 1
    shown = capsys.readouterr().out
    assert "requests failed (too_large), such as " in shown and "does not fit: a prefill rank holds" in shown
    assert "raise topology.prefill_blocks and topology.decode_blocks, or replay shorter sessions" in shown


def test_the_simulated_link_has_the_rates_the_rack_plans_with() -> None:
    link = link_of(load_settings(None, ["rates.fetch_latency_s=0.005", "rates.fetch_bytes_per_s=2e9"]))
    assert (link.latency_ns, link.bytes_per_s) == (5_000_000, 2e9)


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    costs: dict[str, StepCost] = {}
    arms: list[Arm] = []
    with pytest.raises(FileFormatError, match=r"file/below: cannot be written \(Not a directory\); choose another with --out"):
        write_run(tmp_path / "file" / "below", arms, [], costs, "demo")


# ---------------------------------------------------------------- serve


def test_flags_of_serve_win_over_settings_and_are_taken_literally(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(host: str, port: int) -> None:
        raise ResourceError(f"host {host}, port {port}")

    monkeypatch.setattr("rackserve.serving.listen", refuse)
    keyless = ["--set", "security.keyless=true"]
    given = ["serve", "--model", "135", "--host", "no", "--port", "5", "--set", "server.port=6", *keyless]
    assert main(given) == 4
    captured = capsys.readouterr()
    assert captured.err == "rackserve: host no, port 5\n"
    assert ' model="135" ' in captured.out


def test_an_events_file_that_cannot_be_written_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in (tmp_path, tmp_path / "file" / "events.jsonl"):
        (tmp_path / "file").write_text("")
        assert main(["serve", *DIGEST, "--port", "0", "--events", str(target)]) == 3
        assert capsys.readouterr().err.startswith(f"rackserve: {target}: cannot be written")


def test_signal_handlers_are_given_back_after_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr("rackserve.serving.listen", lambda host, port: (_ for _ in ()).throw(ResourceError("no")))
    assert main(["serve", *DIGEST]) == 4
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# ---------------------------------------------------------------- swarm


def test_a_swarm_counts_seeds_and_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--seeds", "3"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("3 of 3 seeds hold all laws; requests: ") and " finished, " in line


def test_a_broken_seed_is_told_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rackserve.sim import swarm

    run_seed = swarm.run_seed

    def sometimes(seed: int) -> swarm.SwarmResult:
        if seed == 1:
            raise InvariantError("seed 1: law I2 does not hold")
        return run_seed(seed)

    monkeypatch.setattr(swarm, "run_seed", sometimes)
    assert main(["swarm", "--seeds", "3"]) == 70
    captured = capsys.readouterr()
    assert captured.err == "seed 1: law I2 does not hold\n"
    assert captured.out.startswith("2 of 3 seeds hold all laws")


def test_one_seed_is_described_and_its_result_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--seed", "4"]) == 0
    first = capsys.readouterr().out
    assert main(["swarm", "--seed", "4"]) == 0
    assert capsys.readouterr().out == first and '"finished"' in first


def test_a_results_folder_is_tried_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *DIGEST, *SMALL, "--out", "/proc/nope"]) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith("rackserve: /proc/nope: cannot be written") and "settings" not in captured.out


def test_more_trees_than_sessions_are_said_not_to_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *DIGEST, *SMALL, "--concurrency", "50"]) == 0
    assert "--concurrency 50: the trace has 1 sessions, so no more can be live at once" in capsys.readouterr().out
