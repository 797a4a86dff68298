"""Runs the public agentx-harness and `rackserve bench --agentx` against one endpoint and says how well they agree.

Usage: agentx_agreement.py --harness VENV/bin/agentx --url http://127.0.0.1:8000 --model NAME --tokenizer FOLDER

The harness (PyPI: agentx-harness) wants an environment of its own, an endpoint with chat, and a Hugging Face tokenizer folder
with an absolute path. Sessions are small synthetic ones, written to --out. Both send the same number of tokens per block, but
other text, and run one after the other: latencies agree as far as the endpoint gives the same twice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rackserve.base.units import NS_PER_MS, NS_PER_S
from rackserve.bench.metrics import percentile, tpot_ms
from rackserve.bench.records import read_recording
from rackserve.bench.session import TraceRequest
from rackserve.bench.synth import Recipe, Spread, synthesize

SMALL = Recipe(
    turns=Spread(12, 0.4, 30),
    fresh_tokens=Spread(700, 0.2),
    resumed_share=0,
    new_tokens=Spread(128, 0.6, 400),
    break_tokens=Spread(300, 0.3),
    compact_share=0,
    most_tokens=6_000,
    output=Spread(20, 0.4, 40),
    gap_s=Spread(1, 0.8, 5),
    long_gap_share=0,
    subagent_share=0,
)
"""Sessions a CPU model can serve: prompts of 700 to 3,500 tokens, a few seconds between turns."""

Row = tuple[str, int, int, float, float]
"""Conversation and turn -> prompt tokens, cached tokens, TTFT and time per token in ms."""


def write_traces(folder: Path, count: int, seed: int) -> None:
    """Weka files, one a session, which both tools read."""
    folder.mkdir(parents=True, exist_ok=True)
    for session in synthesize(count, seed, SMALL):
        requests = [
            {"t": turn.at_ns / NS_PER_S, "type": "s", "model": "m", "in": turn.input_tokens, "out": turn.output_tokens,
             "hash_ids": array("i", turn.hash_ids).tolist(), "input_types": ["text"], "output_types": ["text"],
             "stop": "end_turn", "api_time": turn.api_ns / NS_PER_S, "think_time": 0.0}
            for turn in session.entries if isinstance(turn, TraceRequest)
        ]  # fmt: skip
        document = {"id": session.id, "models": ["m"], "block_size": session.block_tokens, "hash_id_scope": "local",
                    "tool_tokens": 128, "system_tokens": 64, "requests": requests}  # fmt: skip
        (folder / f"{session.id}.json").write_text(json.dumps(document))


def of_harness(path: Path) -> tuple[list[str], list[Row]]:
    """Warm-up requests, and the rows of all others that ended well."""
    warm: list[str] = []
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        about = record["metadata"]
        name = f"{about['conversation_id']}/{about['turn_index']}"
        if about["phase_kind"] == "warmup":
            warm.append(name)
            continue
        values = {key: metric.get("value") for key, metric in record["metrics"].items()}
        if values.get("time_to_first_token") is not None:
            prompt = values.get("usage_prompt_tokens") or values["input_sequence_length"]
            cached = values.get("usage_prompt_cache_read_tokens") or 0
            rows.append((name, prompt, cached, values["time_to_first_token"], values.get("inter_token_latency") or 0.0))
    return warm, rows


def of_bench(path: Path) -> tuple[list[str], list[Row]]:
    """The same of a recording."""
    warm: list[str] = []
    rows: list[Row] = []
    for record in read_recording(path).requests:
        session, _, _, turn = record.id.split("/")
        if record.warmup:
            warm.append(f"{session}/{turn}")
        elif not record.error:
            ttft = (record.first_ns - record.sent_ns) / NS_PER_MS
            rows.append((f"{session}/{turn}", record.prompt_tokens, record.cached_tokens, ttft, tpot_ms(record) or 0.0))
    return warm, rows


def table(theirs: list[Row], ours: list[Row]) -> Iterable[str]:
    """Figures over the requests both sent."""
    common = {row[0] for row in theirs} & {row[0] for row in ours}
    left, right = ([row for row in rows if row[0] in common] for rows in (theirs, ours))
    yield f"{'over ' + str(len(common)) + ' common requests':32} {'harness':>12} {'rackserve':>12}"
    hits = [sum(row[2] for row in rows) / max(1, sum(row[1] for row in rows)) for rows in (left, right)]
    yield f"{'hit rate':32} {hits[0]:12.2%} {hits[1]:12.2%}"
    for name, column in (("TTFT", 3), ("time per token", 4)):
        for share in (0.5, 0.9):
            pair = [percentile(sorted(row[column] for row in rows) or [0.0], share) for rows in (left, right)]
            yield f"{f'{name} p{share * 100:.0f} in ms':32} {pair[0]:12.1f} {pair[1]:12.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--harness", "--url", "--model", "--tokenizer"):
        parser.add_argument(name, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/agentx"))
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--concurrency", default="2")
    parser.add_argument("--seconds", default="45")
    parser.add_argument("--warmup-requests", default="1")
    given = parser.parse_args()
    out = given.out.resolve()
    write_traces(out / "traces", given.sessions, given.seed)
    theirs = [given.harness, "profile", "--url", given.url, "--endpoint", "/v1/chat/completions", "--model", given.model]
    theirs += ["--tokenizer", given.tokenizer, "--input-file", str(out / "traces"), "--custom-dataset-type", "weka_trace"]
    theirs += ["--concurrency", given.concurrency, "--benchmark-duration", given.seconds, "--unsafe-override", "--streaming"]
    theirs += [
        "--warmup-requests-per-lane",
        given.warmup_requests,
        "--ui",
        "none",
        "--output-artifact-dir",
        str(out / "harness"),
    ]
    ours = [sys.executable, "-m", "rackserve", "bench", "--url", given.url, "--model", given.model, "--agentx"]
    ours += ["--trace", str(out / "traces"), "--concurrency", given.concurrency, "--deadline", given.seconds]
    ours += ["--warmup-requests", given.warmup_requests, "--out", str(out / "bench")]
    subprocess.run(theirs, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(ours, check=True)
    their_warm, their_rows = of_harness(out / "harness" / "profile_export.jsonl")
    our_warm, our_rows = of_bench(out / "bench" / "live-bench.jsonl")
    same = "the same" if set(their_warm) == set(our_warm) else "NOT the same"
    print(f"warm-up requests: {len(their_warm)} and {len(our_warm)}, {same}")
    shorter = min(len(their_rows), len(our_rows))
    begins = [{row[0] for row in rows[:shorter]} for rows in (their_rows, our_rows)]
    print(f"of the first {shorter} measured requests, {len(begins[0] & begins[1])} are the same turns")
    print("\n".join(table(their_rows, our_rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
