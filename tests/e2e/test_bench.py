"""The benchmark client against a served rack, both started by the command line."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import msgspec

from rackserve.bench.records import read_recording
from tests.e2e.rig import command, poll, serve


def test_a_benchmark_of_a_served_rack_counts_what_the_server_counts(tmp_path: Path, digest: list[str]) -> None:
    out = tmp_path / "bench"
    with serve(tmp_path, *digest) as rack:
        (tmp_path / "client").mkdir()
        options = ["--limit", "2", "--max-turns", "3", "--serial", "--time-scale", "1000", "--gpus", "3", "--out", str(out)]
        with command(tmp_path / "client", "bench", "--url", f"{rack.url}/v1", *options) as running:
            assert running.ends(30.0) == 0, running.errors
            assert running.output.splitlines()[-1] == f"report: {out / 'report.html'}"
    requests = read_recording(out / "live-bench.jsonl").requests
    assert requests and not any(record.error for record in requests)
    assert all(record.prompt_tokens == record.planned_prompt_tokens for record in requests)
    assert sum(record.cached_tokens for record in requests) == sum(record.ideal_cached_tokens for record in requests) > 0
    summary = msgspec.json.decode((out / "live-bench.summary.json").read_bytes())
    assert summary["num_done"] == len(requests) and summary["valid"]


def series(url: str, name: str) -> float:
    """The value of one series of /metrics, 0 if it is not there."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_ctrl_c_ends_a_benchmark_at_once_and_keeps_what_is_done(tmp_path: Path, digest: list[str]) -> None:
    out = tmp_path / "bench"
    with serve(tmp_path, *digest, "--set", "runner.step_ms=20") as rack:
        (tmp_path / "client").mkdir()
        options = ["--limit", "3", "--concurrency", "3,1", "--time-scale", "100", "--out", str(out)]
        with command(tmp_path / "client", "bench", "--url", rack.url, *options) as running:
            finished = 'rackserve_requests_total{outcome="finished"}'
            poll(lambda: series(rack.url, finished) >= 2, 20.0, "requests are done")
            running.signal(signal.SIGINT)
            assert running.ends(10.0) == 130, running.errors
            assert "the run was interrupted" in running.output
    summary = msgspec.json.decode((out / "live-c3.summary.json").read_bytes())
    assert summary["interrupted"] and not summary["valid"] and summary["num_done"] > 0
    assert (
        summary["num_sent"]
        == summary["num_done"] + summary["num_unfinished"]
        == len([record for record in read_recording(out / "live-c3.jsonl").requests if not record.warmup])
    )
    assert (out / "report.html").exists() and not (out / "live-c1.jsonl").exists()
