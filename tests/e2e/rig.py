"""A served rack as its users meet it: real processes, started by the command line, spoken to over HTTP.

The digest model is served with a tokenizer that spells token N as four hexadecimal digits, so that the text of an answer tells
its tokens exactly.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from rackserve.base.rng import draw_below
from rackserve.digest_model import cold_output
from rackserve.text.tokenizer import pack

VOCABULARY = 41_000
GONE_WITHIN_S = 3.0
T = TypeVar("T")


def hex_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of VOCABULARY tokens, each spelt as four hexadecimal digits, into `folder`."""
    folder.mkdir(exist_ok=True)
    backend = Backend(models.BPE(vocab={f"{number:04x}": number for number in range(VOCABULARY)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def digest_options(tokenizer: Path) -> list[str]:
    """Options that make a command use the digest model with that tokenizer."""
    settings = {"runner.kind": "digest", "runner.vocab_size": VOCABULARY, "server.tokenizer": tokenizer}
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def prompt(name: str, length: int) -> list[int]:
    """`length` token ids that are a function of `name`."""
    return [draw_below(VOCABULARY, "prompt", name, place) for place in range(length)]


def cold(ids: Sequence[int], max_tokens: int) -> list[int]:
    """What a fresh, cacheless server answers."""
    return cold_output(pack(ids), max_tokens, vocab_size=VOCABULARY)


# ---------------------------------------------------------------- processes


def members(session: int) -> list[int]:
    """Processes of a session that still run (zombies do not)."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, _, _, number = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it ended meanwhile
                continue
            if int(number) == session and state not in "ZX":
                found.append(int(entry))
    return found


def poll(condition: Callable[[], T], limit_s: float, what: str) -> T:
    """Wait until `condition` holds; its value. Fails after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.01)
    return value


async def until(condition: Callable[[], Coroutine[Any, Any, T]], limit_s: float, what: str) -> T:
    """The same inside an event loop."""
    end = time.monotonic() + limit_s
    while not (value := await condition()):
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return value


SHARED = Path("/dev/shm")


def shared_memory() -> frozenset[str]:
    """Names in the machine's shared memory folder."""
    return frozenset(os.listdir(SHARED))


_pids: set[str] = set()
_held: set[str] = set()
"""Processes of our commands, and the names there that they have been seen to use."""


def note(session: int) -> None:
    """Remember what the processes of a session use of that folder, so that it is missed when they are gone."""
    for pid in members(session):
        _pids.add(str(pid))
        with suppress(OSError):  # it ended meanwhile
            used = Path(f"/proc/{pid}/maps").read_text(errors="replace").split()
            used += [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            _held.update(path.removeprefix(f"{SHARED}/") for path in used if path.startswith(f"{SHARED}/"))


def left_behind(before: frozenset[str], pids: Sequence[str] = ()) -> set[str]:
    """Names that have come there since and are of our commands: they have our name or a process's, or were in use by one.

    `pids`: processes that no command here has started. Whatever else runs on this machine makes files there, too.
    """
    fresh = shared_memory() - before
    return {name for name in fresh if name in _held or "rackserve" in name or _pids.union(pids) & set(re.findall(r"\d+", name))}


@dataclass(slots=True)
class Command:
    """A running `rackserve` command in a session of its own; its output goes to files."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def output(self) -> str:
        return self.out.read_text()

    @property
    def errors(self) -> str:
        return self.err.read_text()

    def said(self, text: str, limit_s: float = 20.0) -> str:
        """The first whole line of output that begins with `text`, once it is there."""

        def look() -> str:
            found = [line for line in self.output.splitlines(keepends=True) if line.startswith(text) and line.endswith("\n")]
            assert found or self.process.poll() is None, f"it ended before it said {text!r}:\n{self.errors}"
            return found[0].strip() if found else ""

        found = poll(look, limit_s, f"output {text!r}")
        note(self.process.pid)
        return found

    def signal(self, number: signal.Signals) -> None:
        note(self.process.pid)
        self.process.send_signal(number)

    def ends(self, limit_s: float) -> int:
        """Its exit code, and a check that no process of its session is left."""
        code = self.process.wait(limit_s)
        self.leaves_nothing()
        return code

    def leaves_nothing(self, within_s: float = GONE_WITHIN_S) -> None:
        poll(lambda: not members(self.process.pid), within_s, "every process of the command is gone")

    def clean_up(self) -> None:
        """End whatever is left, by force."""
        for pid in members(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


@contextmanager
def command(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Command]:
    """`python -m rackserve ARGUMENTS`; on leaving nothing of it runs any more."""
    out, err = folder / "out.txt", folder / "err.txt"
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rackserve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    running = Command(process, out, err)
    try:
        yield running
    finally:
        running.clean_up()


# ---------------------------------------------------------------- a served rack


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got. `error`: code of an error body or event; "closed" if the connection broke."""

    status: int
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


@dataclass(slots=True)
class Rack:
    """A rack that serves at `url`."""

    command: Command
    url: str

    def client(self) -> httpx.AsyncClient:
        """A client for many connections at once."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=60.0, limits=limits, trust_env=False)

    def run(self, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]], limit_s: float = 60.0) -> T:
        """The result of `work`, given a client; it must end within `limit_s`."""

        async def body() -> T:
            async with self.client() as client:
                return await asyncio.wait_for(work(client), limit_s)

        return asyncio.run(body())

    def pid_of(self, worker: str) -> int:
        """Process id of a rank that is up, 0 otherwise."""
        ranks = httpx.get(f"{self.url}/health", trust_env=False).json()["ranks"]
        return next(rank["pid"] if rank["state"] == "up" else 0 for rank in ranks if rank["worker"] == worker)

    def devices_of(self, worker: str) -> list[int]:
        """Process ids of the devices of a worker that is up, the leading one first."""
        ranks = httpx.get(f"{self.url}/health", trust_env=False).json()["ranks"]
        return next(rank["devices"] for rank in ranks if rank["worker"] == worker)


@contextmanager
def serve(folder: Path, *options: str) -> Iterator[Rack]:
    """A rack started by `rackserve serve` on a free port. It is told to stop at the end, must end well and leave nothing."""
    shared = shared_memory()
    with command(folder, "serve", "--port", "0", *options) as running:
        url = running.said("serving ").split(" on ")[1].split()[0]
        yield Rack(running, url)
        if running.process.poll() is None:
            running.signal(signal.SIGTERM)
            assert running.ends(15.0) == 0, running.errors
    assert not left_behind(shared)


async def complete(client: httpx.AsyncClient, ids: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
    """A greedy completion of token ids, not streamed."""
    body = {"prompt": list(ids), "max_tokens": max_tokens, "temperature": 0, **fields}
    try:
        response = await client.post("/v1/completions", json=body)
    except httpx.TransportError as error:
        return Answer(0, error="closed", message=repr(error))
    found = response.json()
    if "error" in found:
        return _failed(response, found["error"])
    choice = found["choices"][0]
    return Answer(response.status_code, tokens_in(choice["text"]), choice["finish_reason"], found["usage"])


async def stream(
    client: httpx.AsyncClient, ids: Sequence[int], max_tokens: int, on_token: Callable[[int], None] | None = None, **fields: Any
) -> Answer:
    """The same, streamed. `on_token` is told how many tokens have come. Cancel the task to hang up."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"prompt": list(ids), "max_tokens": max_tokens, "temperature": 0, **options, **fields}
    text, finish = "", ""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return _failed(response, response.json()["error"])
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return Answer(200, tokens_in(text), finish, error=chunk["error"]["code"], message=chunk["error"]["message"])
                for choice in chunk["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
                if on_token is not None:
                    on_token(len(text) // 4)
                if chunk["usage"] is not None:
                    return Answer(200, tokens_in(text), finish, chunk["usage"])
    except httpx.TransportError as error:
        return Answer(0, tokens_in(text), error="closed", message=repr(error))
    return Answer(200, tokens_in(text), error="closed", message="the stream ended without usage")


def _failed(response: httpx.Response, error: Mapping[str, Any]) -> Answer:
    return Answer(response.status_code, error=error["code"], message=error["message"], headers=response.headers)


def tokens_in(text: str) -> list[int]:
    """The tokens that an answer of the digest model spells."""
    assert len(text) % 4 == 0, text
    return [int(text[place : place + 4], 16) for place in range(0, len(text), 4)]


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """The sum of the series called `rackserve_NAME`, whatever their labels, or of one series if NAME has labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    series = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    values = [float(value) for head, value in series if f"rackserve_{name}" in (head, head.split("{")[0])]
    assert values, f"no series {name}"
    return sum(values)


async def is_idle(client: httpx.AsyncClient) -> bool:
    """Whether nothing is open, queued or running, as /health and /metrics tell."""
    open_requests = (await client.get("/health")).json()["open_requests"]
    running, queued = await metric(client, "requests_running"), await metric(client, "requests_queued")
    return open_requests == 0 and running == 0 and queued == 0


def as_ids(tokens: bytes) -> list[int]:
    """Token ids of a packed buffer."""
    return list(array("i", tokens))
