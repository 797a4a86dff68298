"""DeepSeek-V4.1 on CPU: the native path beside the torch path it must agree with, and what drafts gain.

Whole steps of a runner, from a `Step` to its result, on one thread each: the tiny checkpoint of the tests and a random model of
some 130 million parameters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import process_time_ns
from typing import TYPE_CHECKING

from measure import CPU_TIME, Claim, Figure, Options, Result, figure, interleave, main

if TYPE_CHECKING:
    from v41_model import Sequences

BATCHES = (1, 8, 32)
ACCEPTANCE = 3.51
"""Tokens a step in the published account of drafts: set beforehand here, as the weights are random."""

MANY = 10.0
"""How many times faster the native path is meant to be for one sequence."""


def run(options: Options) -> Result:
    question = "How fast is DeepSeek-V4.1's native path beside the torch path, and what do drafts gain?"
    if find_spec("torch") is None:
        return Result("v41_engine", question, CPU_TIME, skipped="the engine extra is not installed")
    from rackserve.kernels.cpu import library, v41

    found = library.find()
    if found is None or not v41.serves(found):
        return Result("v41_engine", question, CPU_TIME, skipped="no native kernels were built here")
    with _models(options) as models:
        figures = [part for name, folder in models for part in _measure(name, folder, options)]
    one = [part for part in figures if part.what.endswith("one sequence, native")]
    claims = tuple(
        Claim(f"{part.what}: at least {MANY:g} times as fast as with torch (median)", _median(part.ratios) <= 1 / MANY)
        for part in one
    )
    notes = (
        f"Kernels: {found.path}. What is multiplied is the checkpoint's own fp8, fp4 and bf16, in float32.",
        f"Random weights: hardly a draft stands, so {ACCEPTANCE} tokens a step are set beforehand (synthetic acceptance). "
        "With few experts, verifying six tokens reads nearly all of them: drafts gain less here than in a model of hundreds.",
    )
    return Result("v41_engine", question, CPU_TIME, claims, tuple(figures), notes)


@contextmanager
def _models(options: Options) -> Iterator[list[tuple[str, str]]]:
    """(name, folder) of the models to measure."""
    from v41_model import write_model

    if options.quick:
        yield [("tiny model", "golden")]
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.seed)
        yield [("tiny model", "golden"), ("130M model", folder)]


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
    variants["drafts as they stand"] = partial(_decode, native, 1, steps, 5)
    variants["drafts as set"] = partial(_decode, assumed, 1, steps, 5)
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


def _steps(per_token: list[float], batch: int) -> list[float]:
    return [value * batch for value in per_token]


def _median(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]


def _prompt(sequences: Sequences) -> float:
    start = process_time_ns()
    sequences.prefill(0)
    return float(process_time_ns() - start)


def _decode(sequences: Sequences, batch: int, steps: int, num_draft: int = 0) -> float:
    """Nanoseconds per token."""
    start, made = process_time_ns(), 0
    for _ in range(steps):
        made += sequences.decode(batch, num_draft)
    return (process_time_ns() - start) / made


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
