"""How fast is the native engine beside other engines on the same cores, and beside what memory allows?

SmolLM2-135M; each engine in a process of its own on as many cores as threads, all others stopped while one computes. Peers are
given by --llamacpp (a build folder), --openvino and --vllm (Pythons), and --gguf (the model's file, and after commas others of
llama.cpp's). How to get them says benchmarks/README.md; one that is not given, or does not run, is named as not measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from math import exp
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic

import msgspec
from engines.answer import prompt
from engines.process import EngineProcess, ending_on_sigterm, say
from measure import Claim, Figure, Options, Result, figure, main, number

HERE = Path(__file__).parent
CLOCK = "wall time of the engine's process"
OURS = "rackserve"
NEEDED = "other engines (--llamacpp, --openvino or --vllm, with --gguf; see benchmarks/README.md), or --alone"
QUESTION = (
    "How fast is the native engine beside other engines with the same model on the same cores, and beside what memory allows?"
)
ROUNDS = 3
SCORED = 2_048
DRAM = 1 << 30


class Case(msgspec.Struct, frozen=True):
    """Something to measure. `batch` 0: a prompt of `context` tokens; else `steps` tokens of so many sequences.

    `least`: what ratio to the best peer is wanted, or 0; `every`: measured in the first of so many rounds.
    """

    context: int
    batch: int = 0
    steps: int = 0
    least: float = 0.0
    every: int = 1

    def __str__(self) -> str:
        return f"decode, batch {self.batch} at {self.context:,}" if self.batch else f"prompt of {self.context:,} tokens"

    def rate(self, engine: EngineProcess, turn: int) -> float:
        """Tokens a second, over all sequences."""
        if self.batch:
            spent = engine.ask(op="decode", batch=self.batch, context=self.context, steps=self.steps)
        else:
            spent = engine.ask(op="prefill", ids=prompt(self.context, 1_000 + turn))
        assert isinstance(spent, float)
        return (self.batch * self.steps if self.batch else self.context) / spent


CASES = (
    Case(512, least=1.2),
    Case(2_048, every=2),
    Case(128, 1, 32, least=1.2),
    Case(2_048, 1, 16, least=2.0),
    Case(128, 8, 12),
    Case(128, 16, 12),
    Case(128, 32, 12, least=1.3),
)
QUICK_CASES = (Case(64), Case(128, 1, 2))
SLOW = {"vLLM bfloat16"}
"""Without the CPU's bf16 instructions: it shows in two cases, measured once, on all cores."""

SLOW_CASES = (CASES[0], CASES[2])


class Entrant(msgspec.Struct, frozen=True):
    """An engine by name, and how it is started with so many threads."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = {}


class Measured(msgspec.Struct):
    """What one engine did on so many threads: rates by case, a value a round; perplexity, if it can tell."""

    name: str
    threads: int
    about: dict[str, object]
    load_s: float
    resident_mib: float = 0.0
    rates: dict[Case, list[float]] = msgspec.field(default_factory=dict)
    perplexity: float | None = None


def entrants(options: Options) -> list[Entrant]:
    """Ours first."""
    from rackserve.model.files import open_model

    def script(python: str, name: str, *words: str) -> tuple[str, ...]:
        return (python, str(HERE / "engines" / f"run_{name}.py"), "{threads}", *words)

    found = [Entrant(OURS, script(sys.executable, "ours", "native"))]
    files = [file for file in options.gguf.split(",") if file]
    if options.llamacpp:
        program = str(Path(options.llamacpp) / "run_llamacpp")
        found += [Entrant(f"llama.cpp {Path(file).stem.rpartition('.')[2]}", (program, "{threads}", file)) for file in files]
    if options.openvino and files:
        found.append(Entrant("OpenVINO", script(options.openvino, "openvino", files[0])))
    if options.vllm:
        model = str(open_model("embedded").path)
        library = Path(options.vllm).parent.parent / "lib" / "libiomp5.so"  # as its own guide has it
        env = {"LD_PRELOAD": str(library)} if library.exists() else {}
        kinds = ("float32", "bfloat16")
        found += [Entrant(f"vLLM {kind}", script(options.vllm, "vllm", model, kind), env) for kind in kinds]
    return found


def measure(threads: int, options: Options, folder: Path, missing: list[str]) -> list[Measured]:
    """All engines on so many threads, in turns."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    running: dict[str, EngineProcess] = {}
    results: dict[str, Measured] = {}
    try:
        for entrant in entrants(options):
            if entrant.name in SLOW and threads < len(os.sched_getaffinity(0)):
                continue
            command = [word.format(threads=threads) for word in entrant.command]
            try:
                engine = EngineProcess(entrant.name, command, cores, entrant.env, folder / f"{entrant.name}-{threads}.log")
            except (OSError, RuntimeError) as error:
                missing.append(f"{entrant.name} with {threads} threads: not measured ({error})")
                say(missing[-1])
                continue
            running[entrant.name] = engine
            results[entrant.name] = Measured(entrant.name, threads, engine.about, engine.load_s)
            say(f"{entrant.name}, {threads} threads: ready after {engine.load_s:.1f} s")
        _rounds(running, results, options, missing)
        text = _text(64 if options.quick else SCORED)
        for name, engine in running.items():
            nats = None if name in SLOW else engine.ask(op="score", ids=text)
            results[name].perplexity = None if nats is None else exp(nats)
            results[name].resident_mib = engine.resident_mib
    finally:
        for engine in running.values():
            engine.close()
    return list(results.values())


def _rounds(running: dict[str, EngineProcess], results: dict[str, Measured], options: Options, missing: list[str]) -> None:
    """The first round warms up. An engine that ends goes from `running` and `results`."""
    cases, rounds = (QUICK_CASES, 1) if options.quick else (CASES, ROUNDS)
    names = list(running)
    for turn in range(rounds + 1):
        begun = monotonic()
        for case in cases:
            if turn % case.every != 1 % case.every:
                continue
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                if name in SLOW and (turn != 1 or case not in SLOW_CASES):
                    continue
                if name not in running:
                    continue
                try:
                    value = case.rate(running[name], turn)
                except (OSError, RuntimeError) as error:
                    running.pop(name).close()
                    missing.append(f"{name} with {results.pop(name).threads} threads: not measured ({error})")
                    say(missing[-1])
                    continue
                if turn:
                    results[name].rates.setdefault(case, []).append(value)
        say(f"round {turn} of {rounds}: {monotonic() - begun:.0f} s")


def _text(length: int) -> list[int]:
    """Ids of the beginning of the licence."""
    from rackserve.model.files import open_model
    from rackserve.text.tokenizer import Tokenizer

    ids = Tokenizer.from_folder(open_model("embedded").path).encode((HERE.parent / "LICENSE").read_text())
    return memoryview(ids).cast("i").tolist()[:length]


def bandwidth(size: int, threads: int, folder: Path) -> list[float]:
    """Bytes a second that so many threads read of `size` bytes, over and over; nothing without a C compiler."""
    program = folder / "bandwidth"
    build = ["cc", "-O3", "-march=native", "-pthread", str(HERE / "engines" / "bandwidth.c"), "-o", str(program)]
    try:
        if not program.exists():
            subprocess.run(build, check=True, capture_output=True)
        done = subprocess.run([program, str(size), str(threads), str(ROUNDS)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return msgspec.json.decode(done.stdout, type=list[float])


def reference_perplexity(folder: Path, quick: bool) -> float:
    """That of bf16 weights with float32 products, which PyTorch computes."""
    command = [sys.executable, str(HERE / "engines" / "run_ours.py"), "1", "torch"]
    engine = EngineProcess("reference", command, sorted(os.sched_getaffinity(0))[:1], {}, folder / "reference.log")
    try:
        nats = engine.ask(op="score", ids=_text(64 if quick else SCORED))
        assert nats is not None
        return exp(nats)
    finally:
        engine.close()


def best_peer(case: Case, threads: int, found: list[Measured]) -> Measured | None:
    """The peer with the highest median that was measured as often as ours."""
    peers = [part for part in found if part.name != OURS and part.name not in SLOW and part.threads == threads]
    peers = [part for part in peers if part.rates.get(case)]
    return max(peers, key=lambda part: median(part.rates[case]), default=None)


def beside_peers(found: list[Measured]) -> tuple[list[Figure], list[Claim]]:
    """Our figures beside the best peer of each case."""
    figures, claims = [], []
    for ours in (part for part in found if part.name == OURS):
        for case, values in ours.rates.items():
            peer = best_peer(case, ours.threads, found)
            where = f"{case}, {ours.threads} thread{'s' * (ours.threads > 1)}"
            if peer is None:
                figures.append(Figure(where, "tokens/s", tuple(values)))
                continue
            figures.append(figure(where, "tokens/s", values, peer.name, peer.rates[case]))
            if case.least:
                ratios = figures[-1].ratios
                text = f"{where}: at least {case.least:g} times the best peer, {peer.name} (median {median(ratios):.2f})"
                claims.append(Claim(text, min(ratios) >= case.least))
    return figures, claims


def beside_memory(found: list[Measured], folder: Path) -> list[Figure]:
    """The rate at which decoding one sequence reads the weights, beside that at which memory is read."""
    figures = []
    for ours in (part for part in found if part.name == OURS):
        size = ours.about["read_bytes"]
        assert isinstance(size, int)
        threads = f"{ours.threads} thread{'s' * (ours.threads > 1)}"
        for what, read in ((f"{size / 1e6:,.0f} MB over and over", size), ("1 GiB over and over", DRAM)):
            speeds = bandwidth(read, ours.threads, folder)
            if speeds:
                figures.append(figure(f"reading {what}, {threads}", "GB/s", speeds, scale=1e-9))
                for case in (case for case in ours.rates if case.batch == 1):
                    rates = [rate * size for rate in ours.rates[case]]
                    figures.append(figure(f"weights read, {case}, {threads}", "GB/s", rates, f"reading {what}",
                                          median(speeds), 1e-9))  # fmt: skip
    return figures


def table(found: list[Measured]) -> str:
    """All engines side by side: medians, in brackets the smallest and largest value."""
    names = list(dict.fromkeys(part.name for part in found))
    by = {(part.name, part.threads): part for part in found}
    threads = sorted({part.threads for part in found})
    lines = [f"| tokens/s | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]

    def row(what: str, cells: list[str]) -> None:
        lines.append(f"| {what} | {' | '.join(cells)} |")

    for case in dict.fromkeys(case for part in found for case in part.rates):
        for count in threads:
            parts = [by[name, count].rates.get(case, []) if (name, count) in by else [] for name in names]
            cells = [f"{number(median(v))} ({number(min(v))} to {number(max(v))})" if v else "–" for v in parts]
            row(f"{case}, {count} thread{'s' * (count > 1)}", cells)
    last = [next((by[name, count] for count in reversed(threads) if (name, count) in by), None) for name in names]
    present = [part for part in last if part is not None]
    row("ready after (s)", [f"{part.load_s:.1f}" for part in present])
    row("resident with this run's KV (MiB)", [f"{part.resident_mib:,.0f}" for part in present])
    row("perplexity", ["–" if part.perplexity is None else f"{part.perplexity:.3f}" for part in present])
    return "\n".join(lines)


def run(options: Options) -> Result:
    if not (options.llamacpp or options.openvino or options.vllm or options.alone):
        return Result("cpu_engine", QUESTION, CLOCK, skipped=f"not run, it needs {NEEDED}")
    ending_on_sigterm()
    missing: list[str] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        counts = sorted({1, 1 if options.quick else len(os.sched_getaffinity(0))})
        found = [part for threads in counts for part in measure(threads, options, folder, missing)]
        figures, claims = beside_peers(found)
        figures += beside_memory(found, folder)
        wanted = reference_perplexity(folder, options.quick)
    ours = next(part for part in found if part.name == OURS)
    assert ours.perplexity is not None
    figures.append(figure("perplexity of the licence's text", "", [ours.perplexity], "bf16 weights, float32 products", wanted))
    claims.append(Claim("perplexity within 1 % of that of bf16 weights", abs(ours.perplexity / wanted - 1) <= 0.01))
    figures.append(Figure("ready after", "s", tuple(part.load_s for part in found if part.name == OURS)))
    claims.append(Claim("ready in less than 5 s", max(figures[-1].values) < 5))
    engines = {part.name: f"{part.name}: {part.about['version']}; {part.about['weights']}." for part in found}
    notes = (table(found), "; ".join(missing) or "All engines given were measured.", *engines.values())
    return Result("cpu_engine", QUESTION, CLOCK, tuple(claims), tuple(figures), notes)


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
