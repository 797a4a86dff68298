"""How many requests of agent sessions are served, and how fast, beside other servers of the same model on the same machine?

The demo's sessions over HTTP, again and again as new ones for a fixed time, by `rackserve bench`, against `rackserve serve` and
(--llamacpp with --gguf, --vllm) `llama-server` and `vllm serve`. benchmarks/README.md has how to get them. All have KV for
every session that is live.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import msgspec
from engines.process import ending_on_sigterm, say
from measure import Claim, Figure, Options, Result, at_most, figure, main, number

CLOCK = "wall time, two cores for servers and client"
NEEDED = "another server (--llamacpp with --gguf, or --vllm; see benchmarks/README.md)"
QUESTION = "How many requests of agent sessions are served, and how fast, beside other servers of the same model and machine?"
OURS = "rackserve"
ROUNDS = 3
LIVE = 8
"""Session trees at once: all of the demo's."""

CONTEXT = 2_048
"""Room of a sequence; the longest of the demo takes 1,029."""

STEADY = ("--recycle", "--deadline", "30")
"""Options of a run: a tree that is done is followed by the next, so that no long pause of one of them bounds what is served."""

SHORT = ("--limit", "2", "--max-turns", "2")
"""Options of a run that only warms up, or shows that it works."""

START_S = 400.0
RUN_S = 500


class Server(msgspec.Struct, frozen=True):
    """How a server is started on a port. `pauses`: it may be stopped by a signal while another one is measured."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = {}
    pauses: bool = True


class Distribution(msgspec.Struct):
    p50: float
    p90: float


class Summary(msgspec.Struct):
    """What is taken of a run's summary."""

    valid: bool
    invalid_reasons: list[str]
    num_done: int
    num_failed: int
    failures: dict[str, int]
    requests_per_s: float
    hit_rate: float
    ttft_ms: Distribution
    interactivity_p50: float
    interactivity_p90: float
    duration_s: float


FIGURES: dict[str, tuple[str, Callable[[Summary], float]]] = {
    "requests served": ("a minute", lambda run: 60 * run.requests_per_s),
    "time to first token, p50": ("ms", lambda run: run.ttft_ms.p50),
    "time to first token, p90": ("ms", lambda run: run.ttft_ms.p90),
    "interactivity, p50": ("tokens/s/user", lambda run: run.interactivity_p50),
    "interactivity, p90": ("tokens/s/user", lambda run: run.interactivity_p90),
    "hit rate": ("", lambda run: run.hit_rate),
}


def servers(options: Options) -> list[Server]:
    """Ours first. The cores are shared between one prefill and one decode rank, as a rack's are; others use them all."""
    from rackserve.model.files import open_model

    cores = str(len(os.sched_getaffinity(0)))
    model = str(open_model("embedded").path)
    blocks = LIVE * CONTEXT // 16
    wanted = {
        "prefill_workers": 1,
        "decode_workers": 1,
        "prefill_blocks": blocks,
        "decode_blocks": blocks,
        "segment_blocks": blocks,
    }
    words = [word for name, value in wanted.items() for word in ("--set", f"topology.{name}={value}")]
    ours = (sys.executable, "-m", "rackserve", "serve", "--port", "{port}", "--set", "runner.kernels=native", *words)
    found = [Server(OURS, ours, pauses=False)]
    if options.llamacpp and options.gguf:
        program = str(Path(options.llamacpp) / "bin" / "llama-server")
        room = ("-np", str(LIVE), "-c", str(LIVE * CONTEXT), "-t", cores, "-tb", cores)
        for file in options.gguf.split(","):
            kind = Path(file).stem.rpartition(".")[2]
            command = (program, "-m", file, "--port", "{port}", "--host", "127.0.0.1", *room)
            found.append(Server(f"llama-server {kind}", command, {"OMP_NUM_THREADS": cores}))
    if options.vllm:
        library = Path(options.vllm).parent.parent / "lib" / "libiomp5.so"  # as its own guide has it
        env = {"LD_PRELOAD": str(library)} if library.exists() else {}
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(cores) - 1}", "OMP_NUM_THREADS": cores}
        module = ("-m", "vllm.entrypoints.cli.main", "serve", model, "--port", "{port}", "--host", "127.0.0.1")
        size = ("--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "32", "--enable-prompt-tokens-details")
        found.append(Server("vLLM float32", (options.vllm, *module, *size), env))
    return found


class Running:
    """A server that answers. RuntimeError with the end of its output if it does not come up."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"{server.name}.log"
        command = [word.format(port=port) for word in server.command]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | server.env, start_new_session=True
            )
        begun = time.monotonic()
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False, verify=False) as client:
            while not _answers(client):
                if self._process.poll() is not None or time.monotonic() > begun + START_S:
                    self.close()
                    tail = self._log.read_text(errors="replace").strip().splitlines()[-5:]
                    raise RuntimeError(f"{server.name} does not answer: " + " | ".join(tail))
                time.sleep(0.2)
        self.ready_s = time.monotonic() - begun

    def bench(self, salt: str, seed: int, *words: str) -> Summary:
        """One run of the client, while only this server may compute."""
        out = self._folder / f"{self.server.name}-{salt}"
        command = [sys.executable, "-m", "rackserve", "bench", "--url", self.url, "--out", str(out), "--seed", str(seed)]
        command += ["--salt", salt, "--concurrency", str(LIVE), "--gpus", "1", *words]
        with self._awake():
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
        files = sorted(out.glob("*.summary.json"))
        if not files:
            raise RuntimeError(f"{self.server.name}: no summary: {done.stdout[-500:]} {done.stderr[-500:]}")
        return msgspec.json.decode(files[0].read_bytes(), type=Summary)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        if self.server.pauses:
            os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        if self.server.pauses:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGSTOP)

    def close(self) -> None:
        """End it, kindly where that is quick."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)
            os.killpg(self._process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _answers(client: httpx.Client) -> bool:
    with suppress(httpx.HTTPError):
        return client.get("/health").status_code == 200
    return False


def start(options: Options, folder: Path, stack: ExitStack, missing: list[str]) -> dict[str, Running]:
    """Every server that comes up, warmed up by two turns of two sessions."""
    running: dict[str, Running] = {}
    for server in servers(options):
        try:
            found = Running(server, folder)
            stack.callback(found.close)
            found.bench("warm", options.seed, *SHORT)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            missing.append(f"{server.name}: not measured ({error})")
            say(missing[-1])
            continue
        running[server.name] = found
        say(f"{server.name}: ready after {found.ready_s:.1f} s")
    return running


def measure(running: dict[str, Running], options: Options, missing: list[str]) -> dict[str, list[Summary]]:
    """Servers in turns; each run has prompts of its own. A server whose run fails is left out."""
    words = SHORT if options.quick else STEADY
    runs: dict[str, list[Summary]] = {name: [] for name in running}
    rounds = 1 if options.quick else ROUNDS
    for turn in range(rounds):
        names = list(running)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name not in runs:
                continue
            try:
                summary = running[name].bench(f"r{turn}", options.seed + turn, *words)
            except (OSError, RuntimeError, msgspec.DecodeError, subprocess.TimeoutExpired) as error:
                del runs[name]
                missing.append(f"{name}: not measured ({error})")
                say(missing[-1])
                continue
            runs[name].append(summary)
            say(f"{name}, round {turn}: {summary.num_done} done, {summary.num_failed} failed, {summary.duration_s:.0f} s")
    return runs


def compare(runs: dict[str, list[Summary]]) -> tuple[list[Figure], list[Claim]]:
    """Our figures beside each peer's, and what was wanted of them."""
    figures: list[Figure] = []
    claims: list[Claim] = []
    for name, (unit, of) in FIGURES.items():
        ours = [of(run) for run in runs[OURS]]
        for peer in (peer for peer in runs if peer != OURS):
            figures.append(figure(name, unit, ours, peer, [of(run) for run in runs[peer]]))
            ratios = figures[-1].ratios
            if name == "requests served":
                text = f"at least twice the requests of {peer} (median {median(ratios):.2f})"
                claims.append(Claim(text, min(ratios) >= 2))
            elif name.startswith("time"):
                claims.append(at_most(f"{name} no longer than with {peer} (median {median(ratios):.2f})", ratios, 1))
            elif name == "interactivity, p90":
                claims.append(Claim(f"{name}, no lower than with {peer} (median {median(ratios):.2f})", min(ratios) >= 1))
    return figures, claims


def table(runs: dict[str, list[Summary]]) -> str:
    """All servers side by side: medians, in brackets the smallest and largest value."""
    lines = [f"| | {' | '.join(runs)} |", f"|---|{'---:|' * len(runs)}"]
    for name, (unit, of) in FIGURES.items():
        parts = [[of(run) for run in found] for found in runs.values()]
        cells = [f"{number(median(part))} ({number(min(part))} to {number(max(part))})" for part in parts]
        lines.append(f"| {name}{f' ({unit})' if unit else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(options: Options) -> Result:
    if not (options.llamacpp or options.vllm):
        return Result("served", QUESTION, CLOCK, skipped=f"not run, it needs {NEEDED}")
    ending_on_sigterm()
    missing: list[str] = []
    with TemporaryDirectory() as name, ExitStack() as stack:
        running = start(options, Path(name), stack, missing)
        runs = measure(running, options, missing)
        ready = "; ".join(f"{name} {found.ready_s:.1f} s" for name, found in running.items())
    figures, claims = compare(runs)
    bad = [f"{name}: {', '.join(run.invalid_reasons)}" for name, found in runs.items() for run in found if not run.valid]
    claims.append(
        Claim("every run is valid, and no request failed here", not bad and not any(run.failures for run in runs[OURS]))
    )
    bad += [f"{name}: failed {run.failures}" for name, found in runs.items() for run in found if run.failures]
    notes = (table(runs), f"Ready after: {ready}.", "; ".join((*missing, *bad)) or "All servers given were measured.")
    return Result("served", QUESTION, CLOCK, tuple(claims), tuple(figures), notes)


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
