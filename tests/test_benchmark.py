from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from rackserve.base.errors import ConfigError
from rackserve.bench.frontier import read_curve
from rackserve.bench.records import read_recording
from rackserve.bench.session import requests_of
from rackserve.bench.trace import read_sessions
from rackserve.benchmark import INTERRUPTED, _first_model, describe, resolve, spec_of
from rackserve.cli import main, parser
from rackserve.commands import read_trace
from rackserve.replay import VOCABULARY, ReplaySpec

FAST = ["--time-scale", "100000", "--limit", "3", "--max-turns", "3"]


def asked(*words: str) -> argparse.Namespace:
    return parser().parse_args(["bench", "--url", "x", *words])


def specified(*words: str, concurrency: int = 4, salt: str = "s") -> ReplaySpec:
    options = asked(*words)
    deviations = resolve(options)
    return spec_of(options, read_trace(options), concurrency, "bench", salt, deviations)


class _Stub(BaseHTTPRequestHandler):
    """Streams as many tokens as asked for, in two chunks; remembers what it was sent. May interrupt its client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    sent: list[tuple[dict[str, str], dict[str, Any]]]
    fails = False
    interrupts_at = 0

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "stub"}]}', "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.sent.append(({name.lower(): value for name, value in self.headers.items()}, body))
        if len(self.sent) == self.interrupts_at:
            os.kill(os.getpid(), signal.SIGINT)
        if self.fails:
            self.send_error(500)
            return
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        end = {"choices": [{"text": "b", "finish_reason": "length"}]}
        events = [{"choices": [{"text": "a"}]}, end, {"choices": [], "usage": usage}]
        pieces = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(sum(map(len, pieces))))
        self.end_headers()
        self.wfile.write(pieces[0])
        time.sleep(0.02)
        self.wfile.write(b"".join(pieces[1:]))

    def _answer(self, raw: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def stub() -> Iterator[tuple[str, type[_Stub]]]:
    kind: type[_Stub] = type("Stub", (_Stub,), {"sent": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", kind
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# ---------------------------------------------------------------- what follows from the options


def test_prompts_are_drawn_from_the_vocabulary_of_the_model_behind_the_endpoint() -> None:
    assert specified("--vocabulary", "3", "500").vocabulary == (3, 500)
    assert specified().vocabulary == VOCABULARY


def test_the_published_rules_are_one_option() -> None:
    options = asked("--agentx")
    assert resolve(options) == ()
    assert (options.scale, options.time_scale, options.start_window, options.warmup_requests) == (1, 1.0, [0.25, 0.75], 10)
    assert (options.recycle, options.separate_agents, options.deadline) == (True, True, 3_600.0)


def test_what_is_given_beside_the_published_rules_wins_and_is_named() -> None:
    options = asked("--agentx", "--scale", "16", "--deadline", "60", "--warmup-requests", "1", "--limit", "4")
    told = resolve(options)
    assert (options.scale, options.deadline, options.warmup_requests, options.time_scale) == (16, 60.0, 1, 1.0)
    assert told == (
        "--scale 16 instead of 1",
        "--warmup-requests 1 instead of 10",
        "--deadline 60 is below 900 seconds",
        "sessions were left out or cut by --limit, --max-turns or --max-context",
    )
    assert resolve(asked("--agentx", "--deadline", "1200")) == ()
    assert specified("--agentx", "--deadline", "60").config["deviations"] == "--deadline 60 is below 900 seconds"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recycle"], "never ends by itself: set --deadline"),
        (["--warmup-requests", "3"], "needs --start-window"),
        (["--serial", "--start-window", "0", "1"], "leave out --recycle and --start-window"),
        (["--open-loop", "--serial"], "sends each session once at its time"),
        (["--open-loop", "--concurrency", "1,2"], "all but one --concurrency"),
        (["--open-loop", "--recycle", "--deadline", "9"], "leave out --recycle"),
        (["--rate", "3"], "--rate needs --open-loop"),
        (["--export", "t", "--concurrency", "1,2"], "--export writes one run"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(asked(*words))


def test_a_run_says_how_it_sends() -> None:
    assert describe(specified()) == "closed loop, 4 session trees at a time"
    assert describe(specified("--serial")) == "closed loop, one request at a time"
    assert describe(specified("--open-loop")) == "open loop, at the recorded times"
    assert describe(specified("--open-loop", "--rate", "2", "--arrival", "constant")) == (
        "open loop, 2 sessions a second (constant)"
    )
    assert [specified(*words).loop for words in ([], ["--serial"], ["--open-loop"])] == ["closed", "serial", "open"]


def test_no_more_trees_than_sessions_unless_they_are_recycled() -> None:
    assert specified("--limit", "2", concurrency=5).concurrency == 2
    assert specified("--limit", "2", "--recycle", "--deadline", "5", concurrency=5).concurrency == 5


# ---------------------------------------------------------------- runs against a stub


def test_a_sweep_runs_each_concurrency_cold_and_leaves_a_frontier(
    stub: tuple[str, type[_Stub]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, kind = stub
    out = tmp_path / "sweep"
    words = ["--concurrency", "1,3", "--out", str(out), "--dp-ranks", "2", "--header", "x-tenant=t", *FAST]
    assert main(["bench", "--url", url, *words]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {
        "frontier.json", "report.html", "live-c1.jsonl", "live-c1.summary.json", "live-c3.jsonl", "live-c3.summary.json"
    }  # fmt: skip
    curve = read_curve(out / "frontier.json")
    assert [point.concurrency for point in curve.points] == [1, 3]
    prompts: dict[str, set[tuple[int, ...]]] = {}
    for headers, body in kind.sent:
        prompts.setdefault(headers["x-request-id"], set()).add(tuple(body["prompt"][:8]))
        assert headers["x-tenant"] == "t" and headers["x-data-parallel-rank"] in "01" and body["model"] == "stub"
    assert all(len(each) == 2 for each in prompts.values()), "the second run's prompts share nothing with the first one's"
    one, three = (read_recording(out / f"live-c{n}.jsonl") for n in (1, 3))
    assert len(one.requests) == len(three.requests) == len(kind.sent) / 2
    assert one.run.client is not None and one.run.config["salt"] != three.run.config["salt"]
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == f"report: {out / 'report.html'}" and "closed loop, 3 session trees at a time" in text


def test_what_was_sent_can_be_written_as_a_trace(stub: tuple[str, type[_Stub]], tmp_path: Path) -> None:
    trace = tmp_path / "sent.jsonl"
    assert main(["bench", "--url", stub[0], "--concurrency", "3", "--export", str(trace), "--out", str(tmp_path), *FAST]) == 0
    records = read_recording(tmp_path / "live-bench.jsonl").requests
    sessions = list(read_sessions(trace))
    assert sum(each.num_requests for each in sessions) == len(records)
    assert len(sessions) == 3 and min(each.start_ns for each in sessions) == 0
    took = sorted(turn.api_ns for each in sessions for turn in requests_of(each.entries))
    assert took == sorted(record.ended_ns - record.sent_ns for record in records)


def test_a_given_salt_makes_a_run_repeatable_and_a_drawn_one_makes_it_cold(stub: tuple[str, type[_Stub]]) -> None:
    url, kind = stub
    prompts = []
    for words in (["--salt", "a"], ["--salt", "a"], [], []):
        kind.sent.clear()
        assert main(["bench", "--url", url, "--serial", *words, *FAST]) == 0
        prompts.append([body["prompt"] for _, body in kind.sent])
    assert prompts[0] == prompts[1] and prompts[1] != prompts[2] != prompts[3]


def test_the_published_rules_run_against_an_endpoint(stub: tuple[str, type[_Stub]], tmp_path: Path) -> None:
    url, kind = stub
    words = ["--agentx", "--scale", "64", "--time-scale", "20000", "--deadline", "0.4", "--concurrency", "2", "--limit", "2"]
    main(["bench", "--url", url, "--out", str(tmp_path), *words])
    recording = read_recording(tmp_path / "live-bench.jsonl")
    warm = [record for record in recording.requests if record.warmup]
    assert warm and all(body["max_tokens"] == 1 for _, body in kind.sent[: len(warm)])
    assert any(not record.warmup for record in recording.requests)
    summary = msgspec.json.decode((tmp_path / "live-bench.summary.json").read_bytes())
    assert summary["num_warmup"] == len(warm) and summary["run"]["config"]["deviations"].startswith("--scale 64 instead of 1")
    assert summary["bench_serve"]["completed"] == summary["num_done"]


def test_an_open_loop_replays_single_requests_and_is_labelled_so(stub: tuple[str, type[_Stub]], tmp_path: Path) -> None:
    url, kind = stub
    trace = tmp_path / "mooncake.jsonl"
    lines = [{"timestamp": 40 * n, "input_length": 1_024, "output_length": 64, "hash_ids": [0, 1 + n]} for n in range(6)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    assert main(["bench", "--url", url, "--trace", str(trace), "--open-loop", "--time-scale", "1", "--out", str(out)]) == 0
    recording = read_recording(out / "live-bench.jsonl")
    assert (recording.run.loop, recording.run.concurrency) == ("open", 0)
    due = sorted(record.due_ns for record in recording.requests)
    assert [at - due[0] for at in due] == [40_000_000 * n for n in range(6)]
    assert len({tuple(body["prompt"][:16]) for _, body in kind.sent}) == 1, "the first block is shared by all sessions"
    assert len({tuple(body["prompt"][16:]) for _, body in kind.sent}) == 6


def test_when_everything_fails_the_files_are_there_and_the_exit_code_is_not_0(
    stub: tuple[str, type[_Stub]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, kind = stub
    kind.fails = True
    assert main(["bench", "--url", url, "--out", str(tmp_path), *FAST]) == 1
    summary = msgspec.json.decode((tmp_path / "live-bench.summary.json").read_bytes())
    assert summary["num_done"] == 0 and summary["failures"] == {"http_500": summary["num_sent"]} and not summary["valid"]
    assert "no request succeeded" in summary["invalid_reasons"]
    # Sessions are live at once: any of them may have the first failure.
    told = rf"live bench: {summary['num_sent']} requests failed \(http_500\), such as trace_\d+/\S+: "
    assert re.search(told, capsys.readouterr().out)


def test_an_interrupted_sweep_leaves_its_files_and_says_so(
    stub: tuple[str, type[_Stub]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal comes while an answer is awaited; the second concurrency is not begun."""
    url, kind = stub
    kind.interrupts_at = 4
    words = ["--concurrency", "1,2", "--out", str(tmp_path), "--time-scale", "100", "--limit", "2"]
    assert main(["bench", "--url", url, *words]) == INTERRUPTED == 130
    summary = msgspec.json.decode((tmp_path / "live-c1.summary.json").read_bytes())
    assert summary["interrupted"] and not summary["valid"] and "the run was interrupted" in summary["invalid_reasons"]
    assert summary["num_done"] >= 2 and sum(summary["slices"]["output"]) == pytest.approx(summary["output_tokens"])
    assert (tmp_path / "report.html").exists() and not (tmp_path / "live-c2.jsonl").exists()
    assert "the run was interrupted" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_model_list_that_is_none_is_told_apart_from_a_server_that_is_down() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(ConfigError, match=r"/v1/models does not answer like an OpenAI server; name one with --model"):
                await _first_model(f"http://127.0.0.1:{port}/v1/", "key")
        with pytest.raises(ConfigError, match=r"is the server running\?"):
            await _first_model(f"http://127.0.0.1:{port}", "")

    asyncio.run(asyncio.wait_for(run(), 10))


# ---------------------------------------------------------------- synthesize


def test_a_synthetic_trace_is_written_and_its_statistics_stand_beside_the_published_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl.gz"
    assert main(["synthesize", "--sessions", "3", "--seed", "5", "--out", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 synthetic sessions, seed 5" and lines[-1] == f"trace: {trace}"
    (row,) = (line for line in lines if line.startswith("input tokens, p50"))
    assert row.split()[-1] == "1.42e+05"
    assert len(list(read_sessions(trace))) == 3
    assert main(["synthesize", "--sessions", "3", "--seed", "5"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[:-1]
