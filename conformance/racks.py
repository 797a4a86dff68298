"""Racks that suites talk to, started as users start them, when they are first wanted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import httpx

from conformance import scripted_model
from conformance.cases import Rack, SuiteError
from rackserve.model.files import open_model

PACE = {
    "runner.kind": "digest", "runner.step_ms": 100.0, "runner.token_us": 250.0, "scheduler.max_steps_in_flight": 1,
    "topology.prefill_workers": 1, "topology.prefill_blocks": 4_000, "topology.decode_blocks": 4_000,
}  # fmt: skip
"""A toy model whose steps take their time, so that what clients measure hangs on them and not on what else the machine does."""

START_S = 300.0
END_S = 20.0
CONTEXT = 1_500
"""Of the embedded model: so small a model does not know when to stop, and some tests set no limit."""

BLOCKS = 8_192
"""Of 16 tokens on each rank of the scripted model: the prompts of some agents have 20,000 tokens."""


class Racks:
    """`get` starts a rack, `close` ends all of them."""

    __slots__ = ("_folder", "_running")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, tuple[Rack, subprocess.Popen[bytes]]] = {}

    def get(self, name: str) -> Rack:
        """The rack of that name, see `_options`. SuiteError, with its last words, if it does not come up."""
        if name in self._running and self._running[name][1].poll() is None:
            return self._running[name][0]
        number = len(list(self._folder.glob(f"{name}-*.out")))
        out, recording = (self._folder / f"{name}-{number}.{kind}" for kind in ("out", "jsonl"))
        command = [sys.executable, "-m", "rackserve", "serve", "--port", "0", "--record", str(recording)]
        command += self._options(name)
        with out.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        words = _wait(process, out)
        rack = Rack(words[3], words[1], recording)
        self._running[name] = rack, process
        return rack

    def close(self) -> None:
        """End them as an operator would; one that does not end within its time is killed and told of."""
        for name, (_, process) in self._running.items():
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                print(f"the {name} rack did not end within {END_S:g} s of SIGTERM", file=sys.stderr)
                os.killpg(process.pid, signal.SIGKILL)
        self._running.clear()

    def _options(self, name: str) -> list[str]:
        """Of the command that serves it."""
        if name == "embedded":
            return ["--model", name, *_set({"server.max_model_len": CONTEXT})]
        if name == "exact":
            return ["--model", "embedded", *_set({"runner.kernels": "torch", "runner.dtype": "fp32"})]
        embedded = open_model("embedded")
        if name == "paced":
            return _set({"server.tokenizer": embedded.path, "runner.vocab_size": embedded.config.vocab_size, **PACE})
        folder = self._folder / scripted_model.NAME
        if not folder.exists():
            assert embedded.tokenizer_path is not None
            scripted_model.write(folder, embedded.tokenizer_path)
        sizes = dict.fromkeys((f"topology.{role}_blocks" for role in ("prefill", "decode", "segment")), BLOCKS)
        return ["--model", str(folder), *_set({**sizes, "scheduler.max_batched_tokens": 2048})]


def _set(settings: Mapping[str, object]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def _wait(process: subprocess.Popen[bytes], out: Path) -> list[str]:
    """The words of the line that says it serves."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        for line in out.read_text(errors="replace").splitlines(keepends=True):
            if line.startswith("serving ") and line.endswith("\n"):
                return line.split()
        time.sleep(0.1)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    raise SuiteError(f"the rack did not start; its last words: {out.read_text(errors='replace')[-300:]}")


class Seen(NamedTuple):
    """A request as the server recorded it: `session` is a digest, of its own for each request that belongs to none."""

    session: str
    prompt: int
    output: int
    error: str


class Watch:
    """What a rack serves from the making of this on."""

    __slots__ = ("_cached", "_offset", "_rack")

    def __init__(self, rack: Rack) -> None:
        self._rack = rack
        self._offset = rack.recording.stat().st_size
        self._cached = _cached_tokens(rack)

    def seen(self) -> list[Seen]:
        """The requests that ended, in that order."""
        with self._rack.recording.open("rb") as file:
            file.seek(self._offset)
            lines = [json.loads(line) for line in file.read().splitlines()]
        return [
            Seen(line["session"], line["input"], line["output"], line.get("error", "")) for line in lines if "session" in line
        ]

    def cached(self) -> int:
        """Prompt tokens that were not computed, by the server's own counter."""
        return _cached_tokens(self._rack) - self._cached


def _cached_tokens(rack: Rack) -> int:
    text = httpx.get(f"{rack.url}/metrics", trust_env=False, timeout=30).text
    lines = (line.split() for line in text.splitlines() if line.startswith("rackserve_cached_prompt_tokens_total"))
    return int(sum(float(words[1]) for words in lines))
