"""DeepSeek-V4.1 on CPU: the native path beside the torch path it must agree with, and what drafts gain.

Whole steps of a runner, from a `Step` to its result, on one thread each unless told otherwise: the tiny checkpoint of the tests
and a random model of some 130 million parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns, process_time_ns
from typing import TYPE_CHECKING

from measure import CPU_TIME, Claim, Figure, Options, Result, figure, interleave, main
from v41_start import ACCEPTANCE, DRAFTS, cores, fastest, kernel_path, random_model, why_not

if TYPE_CHECKING:
    from v41_model import Sequences

BATCHES = (1, 8, 32)

MANY = 10.0
"""How many times faster the native path is meant to be for one sequence."""


def run(options: Options) -> Result:
    question = "How fast is DeepSeek-V4.1's native path beside the torch path, and what do drafts gain?"
    if skipped := why_not():
        return Result("v41_engine", question, CPU_TIME, skipped=skipped)
    with random_model(options) as folder:
        models = [("tiny model", "golden")] if options.quick else [("tiny model", "golden"), ("130M model", folder)]
        figures = [
            part for name, folder in models for part in (*_measure(name, folder, options), *_shared(name, folder, options))
        ]
    one = [part for part in figures if part.what.endswith("one sequence, native")]
    claims = tuple(
        Claim(f"{part.what}: at least {MANY:g} times as fast as with torch (median)", _median(part.ratios) <= 1 / MANY)
        for part in one
    )
    notes = (
        f"Kernels: {kernel_path()}. What is multiplied is the checkpoint's own fp8, fp4 and bf16, in float32.",
        f"Random weights: hardly a draft stands, so {ACCEPTANCE} tokens a step are set beforehand (synthetic acceptance). "
        "With few experts, verifying six tokens reads nearly all of them: drafts gain less here than in a model of hundreds.",
    )
    return Result("v41_engine", question, CPU_TIME, claims, tuple(figures), notes)


def _measure(name: str, folder: str, options: Options) -> list[Figure]:
    from v41_model import Sequences

    from rackserve.model.deepseek_v41.options import RunnerOptions
    from rackserve.model.files import open_model

    files, batches = open_model(folder), BATCHES[:1] if options.quick else BATCHES
    context, steps = (128, 3) if options.quick else (256, 10)
    native, reference = (Sequences(files, kernels, max(batches), context) for kernels in ("native", "torch"))
    assumed = Sequences(files, "native", 1, context, RunnerOptions(synthetic_acceptance=ACCEPTANCE))
    for sequences in (native, reference, assumed):
        for sequence in range(max(batches) if sequences is not assumed else 1):
            sequences.prefill(sequence)
    variants: dict[str, Callable[[], float]] = {}
    for path, sequences in (("native", native), ("torch", reference)):
        variants[f"prompt {path}"] = partial(_prompt, sequences)
        for batch in batches:
            variants[f"{batch} {path}"] = partial(_decode, sequences, batch, steps if path == "native" else 2)
    variants["drafts as they stand"] = partial(_decode, native, 1, steps, DRAFTS)
    variants["drafts as set"] = partial(_decode, assumed, 1, steps, DRAFTS)
    ns = interleave(variants, options.rounds)
    figures = []
    for batch in batches:
        what = f"{name}, decode of {f'{batch} sequences' if batch > 1 else 'one sequence'}"
        figures.append(figure(f"{what}, native", "ms a step", _steps(ns[f"{batch} native"], batch), "the torch path",
                              _steps(ns[f"{batch} torch"], batch), 1e-6))  # fmt: skip
    figures.append(
        figure(f"{name}, prompt of {context}, native", "ms", ns["prompt native"], "the torch path", ns["prompt torch"], 1e-6)
    )
    for what, key in (
        (f"{ACCEPTANCE} tokens a step taken", "drafts as set"),
        ("as many drafts taken as stand", "drafts as they stand"),
    ):
        figures.append(
            figure(f"{name}, one sequence with drafts, {what}", "ms a token", ns[key], "without drafts", ns["1 native"], 1e-6)
        )
    return figures


def _shared(name: str, folder: str, options: Options) -> list[Figure]:
    """The same steps on two threads, each on a core of its own, beside one thread: by the clock, as threads that wait spin."""
    from v41_model import Sequences

    from rackserve.model.deepseek_v41.options import RunnerOptions
    from rackserve.model.files import open_model

    if len(cores()) < 2:
        return []
    files, (context, steps) = open_model(folder), (128, 3) if options.quick else (256, 40)
    variants: dict[str, Callable[[], float]] = {}
    for threads in (1, 2):
        assumed = RunnerOptions(synthetic_acceptance=ACCEPTANCE)
        plain, drafting = (
            Sequences(files, "native", 1, context, each, threads=threads, cores=cores()[:threads]) for each in (None, assumed)
        )
        drafting.prefill(0)
        variants[f"prompt of {context} {threads}"] = partial(_prompt, plain, perf_counter_ns)
        variants[f"decode of one sequence {threads}"] = partial(fastest, plain, steps, 0)
        variants[f"one sequence with drafts {threads}"] = partial(fastest, drafting, steps, DRAFTS)
    ns = interleave(variants, options.rounds)
    return [
        figure(f"{name}, {what[:-2]}, two threads", "ms by the clock", ns[f"{what[:-2]} 2"], "one thread", ns[what], 1e-6)
        for what in variants
        if what.endswith(" 1")
    ]


def _steps(per_token: list[float], batch: int) -> list[float]:
    return [value * batch for value in per_token]


def _median(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]


def _prompt(sequences: Sequences, clock: Callable[[], int] = process_time_ns) -> float:
    start = clock()
    sequences.prefill(0)
    return float(clock() - start)


def _decode(sequences: Sequences, batch: int, steps: int, num_draft: int = 0) -> float:
    """Nanoseconds per token."""
    start, made = process_time_ns(), 0
    for _ in range(steps):
        made += sequences.decode(batch, num_draft)
    return (process_time_ns() - start) / made


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
