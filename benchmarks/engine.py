"""The CPU reference engine: prefill and decode speed, beside its bare matrix products and beside reading its weights once.

It is built to be right and to repeat itself bit by bit, on one thread in float32; these figures say what that costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import process_time_ns

from measure import CPU_TIME, Figure, Options, Result, at_most, figure, interleave, main, ns_per_call
from real_step import CHUNK, CONTEXT, RealEngine, missing

BATCHES = (1, 4, 8)


def run(options: Options) -> Result:
    question = "How fast is the CPU reference engine, beside what its matrix products and its memory would allow?"
    lacking = missing()
    if lacking:
        return Result("engine", question, CPU_TIME, skipped=lacking)
    batches = BATCHES[:1] if options.quick else BATCHES
    engine = RealEngine(max(batches), context=64 if options.quick else CONTEXT)
    for sequence in range(max(batches)):
        engine.prefill(sequence)
    products = _products(engine)
    chunk = min(CHUNK, engine.context)
    variants: dict[str, Callable[[], float]] = {
        "read": _read_weights(engine),
        "prefill": partial(_prefill, engine),
        "prefill products": partial(ns_per_call, partial(products, chunk), 1),
    }
    for batch in batches:
        variants[f"decode {batch}"] = partial(ns_per_call, partial(engine.decode, batch), 1)
        variants[f"products {batch}"] = partial(ns_per_call, partial(products, max(batch, 2)), 1)
    ns = interleave(variants, options.rounds)
    per_token = [value / chunk for value in ns["prefill products"]]
    to = f"the model's matrix products alone, {chunk} rows"
    prefill = Figure(f"prefill of {engine.context} tokens, chunks of {chunk}", "tokens/s",
                     tuple(1e9 / value for value in ns["prefill"]), to,
                     figure("", "", ns["prefill"], to, per_token).ratios)  # fmt: skip
    figures = [prefill]
    for batch in batches:
        step, alone = ns[f"decode {batch}"], ns[f"products {batch}"]
        what = f"decode step, batch {batch}, context {engine.context}"
        figures.append(figure(what, "ms", step, "the model's matrix products alone, as many rows", alone, 1e-6))
        figures.append(figure(what, "ms", step, "reading every weight once", ns["read"], 1e-6))
    figures.append(_bandwidth(engine, ns["read"]))
    claims = tuple(
        at_most(f"{part.what} takes at most twice as long as {part.to}", part.ratios, 2)
        for part in figures
        if "products" in part.to
    )
    notes = (
        "A reference engine: one torch thread, float32 arithmetic, KV in bf16, results independent of the batch. Not a fast "
        "one, and no statement about any GPU.",
    )
    return Result("engine", question, CPU_TIME, claims, tuple(figures), notes)


def _prefill(engine: RealEngine) -> float:
    """Nanoseconds per prompt token."""
    start = process_time_ns()
    engine.prefill(0)
    return (process_time_ns() - start) / engine.context


def _products(engine: RealEngine) -> Callable[[int], None]:
    """All matrix products of a forward pass over some rows, and nothing else; logits of at most 8 rows."""
    import torch

    weights = engine.runner.weights
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]

    def multiply(rows: int) -> None:
        with torch.inference_mode():
            for matrix in matrices:
                torch.mm(torch.ones(rows, matrix.shape[0]), matrix)
            torch.mm(torch.ones(min(rows, 8), weights.head.shape[0]), weights.head)

    return multiply


def _weight_bytes(engine: RealEngine) -> int:
    weights = engine.runner.weights
    layers = [m for layer in weights.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return sum(matrix.numel() * matrix.element_size() for matrix in (*layers, weights.head))


def _read_weights(engine: RealEngine) -> Callable[[], float]:
    """Nanoseconds to read every matrix once, by the fastest plain reduction torch has."""
    weights = engine.runner.weights
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)] + [weights.head]
    return partial(ns_per_call, lambda: [matrix.sum() for matrix in matrices], 1)


def _bandwidth(engine: RealEngine, read: list[float]) -> Figure:
    size = _weight_bytes(engine)
    return Figure(f"reading every weight once ({size / 1e6:,.0f} MB)", "GB/s", tuple(size / value for value in read))


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
