"""Do the AgentX harness and `rackserve bench --agentx` measure the same on the same rack?

The harness (PyPI: agentx-harness) needs an environment of its own: give its command as --harness VENV/bin/agentx. Both replay
the same small synthetic sessions, in turn, each against a freshly started `rackserve serve` whose model keeps a fixed pace, so
that latencies hang on the clients' rules and not on what else the machine does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from measure import Claim, Figure, Options, Result, figure, main
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
"""Sessions for the toy model: prompts of 500 to 4,000 tokens, a few seconds between turns."""

SESSIONS = 12
CONCURRENCY = "3"
WARMUP = "2"
SECONDS = "50"
ROUNDS = 3
STEP_MS = 100.0
TOKEN_US = 250.0
CHARACTERS = "".join(map(chr, range(0x21, 0x7F))) + "\u0120\u010a"
"""What a token each stands for: printable ASCII, space and newline in the spelling of byte-level BPE."""

HIT_POINTS = 1.0
TTFT_SHARE = 0.10
TPOT_SHARE = 0.05
"""Bounds for medians over the rounds: a single round also tells what else the machine did meanwhile."""
SIZES = {
    "runner.kind": "digest",
    "runner.vocab_size": len(CHARACTERS),
    "runner.step_ms": STEP_MS,
    "runner.token_us": TOKEN_US,
    "topology.prefill_workers": 1,
    "topology.decode_workers": 1,
    "topology.prefill_blocks": 4_000,
    "topology.decode_blocks": 4_000,
    "topology.segment_blocks": 8_000,
    "scheduler.max_steps_in_flight": 1,
}


class Row(msgspec.Struct, frozen=True):
    """One measured request: counts by the server, times in ms. `turn`: session and number of the turn."""

    turn: str
    prompt: int
    cached: int
    ttft: float
    tpot: float


class Run(msgspec.Struct, frozen=True):
    """What one client sent: the turns that warmed up, and all others that ended well."""

    warm: tuple[str, ...]
    rows: tuple[Row, ...]


def write_traces(folder: Path, seed: int) -> None:
    """Weka files, one a session, which both clients read."""
    folder.mkdir()
    for session in synthesize(SESSIONS, seed, SMALL):
        requests = [
            {"t": turn.at_ns / NS_PER_S, "type": "s", "model": "m", "in": turn.input_tokens, "out": turn.output_tokens,
             "hash_ids": array("i", turn.hash_ids).tolist(), "input_types": ["text"], "output_types": ["text"],
             "stop": "end_turn", "api_time": turn.api_ns / NS_PER_S, "think_time": 0.0}
            for turn in session.entries if isinstance(turn, TraceRequest)
        ]  # fmt: skip
        document = {"id": session.id, "models": ["m"], "block_size": session.block_tokens, "hash_id_scope": "local",
                    "tool_tokens": 128, "system_tokens": 64, "requests": requests}  # fmt: skip
        (folder / f"{session.id}.json").write_text(json.dumps(document))


def write_tokenizer(folder: Path) -> None:
    """One token a character, and a chat template: every text has the same length for server and clients."""
    folder.mkdir()
    backend = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(CHARACTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "~", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@contextmanager
def served(tokenizer: Path) -> Iterator[str]:
    """The address of a rack that keeps the pace; gone when the block is left."""
    settings = {**SIZES, "server.tokenizer": tokenizer}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "rackserve", "serve", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield next(line.split(" on ")[1].split()[0] for line in server.stdout if line.startswith("serving "))
        finally:
            server.terminate()


def with_harness(harness: str, folder: Path, url: str) -> Run:
    """One run of the harness."""
    out = folder / "harness"
    shutil.rmtree(out, ignore_errors=True)
    words = ["profile", "--url", url, "--endpoint", "/v1/chat/completions", "--model", "digest", "--streaming"]
    words += ["--tokenizer", str(folder / "tokenizer"), "--input-file", str(folder / "traces")]
    words += ["--custom-dataset-type", "weka_trace", "--concurrency", CONCURRENCY, "--benchmark-duration", SECONDS]
    words += ["--warmup-requests-per-lane", WARMUP, "--unsafe-override", "--ui", "none", "--output-artifact-dir", str(out)]
    subprocess.run([harness, *words], check=True, capture_output=True, cwd=folder)
    warm: list[str] = []
    rows: list[Row] = []
    for line in (out / "profile_export.jsonl").read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        about = record["metadata"]
        turn = f"{about['conversation_id']}/{about['turn_index']}"
        values = {name: metric.get("value") for name, metric in record["metrics"].items()}
        if about["phase_kind"] == "warmup":
            warm.append(turn)
        elif values.get("inter_token_latency") is not None:
            cached = values.get("usage_prompt_cache_read_tokens") or 0
            times = values["time_to_first_token"], values["inter_token_latency"]
            rows.append(Row(turn, values["usage_prompt_tokens"], cached, *times))
    return Run(tuple(warm), tuple(rows))


def with_bench(folder: Path, url: str) -> Run:
    """One run of `rackserve bench`."""
    out = folder / "bench"
    shutil.rmtree(out, ignore_errors=True)
    words = ["bench", "--url", url, "--agentx", "--trace", str(folder / "traces"), "--concurrency", CONCURRENCY]
    words += ["--deadline", SECONDS, "--warmup-requests", WARMUP, "--vocabulary", "0", str(len(CHARACTERS)), "--out", str(out)]
    subprocess.run([sys.executable, "-m", "rackserve", *words], check=True, capture_output=True)
    warm: list[str] = []
    rows: list[Row] = []
    for record in read_recording(out / "live-bench.jsonl").requests:
        session, _, _, number = record.id.split("/")
        tpot = tpot_ms(record)
        if record.warmup:
            warm.append(f"{session}/{number}")
        elif not record.error and tpot is not None:
            ttft = (record.first_ns - record.sent_ns) / NS_PER_MS
            rows.append(Row(f"{session}/{number}", record.prompt_tokens, record.cached_tokens, ttft, tpot))
    return Run(tuple(warm), tuple(rows))


def common(theirs: Run, ours: Run) -> tuple[list[Row], list[Row]]:
    """The requests that both sent, as each saw them."""
    turns = {row.turn for row in theirs.rows} & {row.turn for row in ours.rows}
    left, right = ([row for row in run.rows if row.turn in turns] for run in (theirs, ours))
    return left, right


def hit_rate(rows: Iterable[Row]) -> float:
    """Cached tokens over prompt tokens, in %."""
    rows = tuple(rows)
    return 100 * sum(row.cached for row in rows) / sum(row.prompt for row in rows)


def figures(pairs: list[tuple[list[Row], list[Row]]]) -> tuple[tuple[Figure, ...], tuple[Claim, ...]]:
    """Each figure as both see it, and the bounds within which they agree."""
    hits = [[hit_rate(rows) for rows in side] for side in zip(*pairs, strict=True)]
    found = [figure("requests that both sent", "", [len(ours) for _, ours in pairs])]
    found += [figure("hit rate, rackserve", "%", hits[1], "the harness", hits[0]), figure("hit rate, harness", "%", hits[0])]
    off = max(abs(left - right) for left, right in zip(*hits, strict=True))
    claims = [Claim(f"hit rates are within {HIT_POINTS:g} point of each other", off <= HIT_POINTS)]
    for name, column, bound in (("TTFT", "ttft", TTFT_SHARE), ("time per token", "tpot", TPOT_SHARE)):
        worst = 0.0
        for share in (0.5, 0.9):
            sides = [
                [percentile(sorted(getattr(row, column) for row in rows), share) for rows in side]
                for side in zip(*pairs, strict=True)
            ]
            label = f"{name} p{share * 100:.0f}"
            made = figure(f"{label}, rackserve", "ms", sides[1], "the harness", sides[0])
            found += [made, figure(f"{label}, harness", "ms", sides[0])]
            worst = max(worst, abs(median(made.ratios) - 1))
        claims.append(Claim(f"the median round's p50 and p90 of {name} are within {bound:.0%} of each other", worst <= bound))
    return tuple(found), tuple(claims)


def run(options: Options) -> Result:
    """Do the AgentX harness and `rackserve bench --agentx` measure the same on the same rack?"""
    question = (
        f"{run.__doc__} {CONCURRENCY} session trees of small synthetic sessions for {SECONDS} s; the rack's steps take "
        f"{STEP_MS:g} ms and {TOKEN_US:g} us a token."
    )
    if not options.harness:
        return Result("agentx_agreement", question, "", skipped="not run, it needs agentx-harness: --harness VENV/bin/agentx")
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_traces(folder / "traces", options.seed)
        write_tokenizer(folder / "tokenizer")
        runs: list[tuple[Run, Run]] = []
        for number in range(min(ROUNDS, options.rounds)):
            both: list[Run] = []
            for turn in (0, 1) if number % 2 == 0 else (1, 0):
                with served(folder / "tokenizer") as url:
                    both.append(with_bench(folder, url) if turn else with_harness(options.harness, folder, url))
            theirs, ours = both if number % 2 == 0 else both[::-1]
            runs.append((theirs, ours))
    found, bounds = figures([common(theirs, ours) for theirs, ours in runs])
    same = all(set(theirs.warm) == set(ours.warm) for theirs, ours in runs)
    alike = all(len(common(*pair)[0]) >= 0.9 * min(len(one.rows) for one in pair) for pair in runs)
    claims = (
        Claim("both warm up with the same requests", same),
        Claim("nine of ten requests that the shorter run measured were sent by the other too", alike),
        *bounds,
    )
    return Result("agentx_agreement", question, "wall time, as each client reports it", claims, found)


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
