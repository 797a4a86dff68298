"""The benchmark client against a served rack, both started by the command line."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rackserve.bench.records import read_recording
from tests.e2e.rig import command, serve


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
