"""rackserve's engine to compare, by a rank's own steps: `python run_ours.py THREADS native`, or torch as a reference."""

from __future__ import annotations

import math
import mmap
import os
import sys
from array import array
from time import perf_counter
from typing import cast

from answer import answer, prompt

from rackserve.base.step import Step, StepItem
from rackserve.model.files import open_model
from rackserve.model.layout import kv_layout
from rackserve.model.native import load_native
from rackserve.model.runner import Kernels, LlamaRunner

BLOCK = 16
CHUNK = 512
SPARE = 64
"""Positions that a sequence has beside its context."""

LONGEST = 4_096 + SPARE
MANY = 32
PROMPT, LONG = 0, 1
FIRST = 2
"""Names of sequences: one for prompts and scores, one for long contexts, then those of a batch."""


class Ours:
    def __init__(self, threads: int, kernels: Kernels) -> None:
        files = open_model("embedded")
        layout = kv_layout(files.llama, BLOCK, "bf16")
        each = (256 + SPARE) // BLOCK
        self._tables = {name: range(name * LONGEST // BLOCK, (name + 1) * LONGEST // BLOCK) for name in (PROMPT, LONG)}
        start = FIRST * LONGEST // BLOCK
        self._tables |= {FIRST + at: range(start + at * each, start + (at + 1) * each) for at in range(MANY)}
        blocks = start + MANY * each
        arena = memoryview(mmap.mmap(-1, blocks * layout.block_bytes))
        cores = tuple(sorted(os.sched_getaffinity(0))) if threads > 1 else ()  # as a rank with cores of its own
        self._runner = LlamaRunner(files, arena, blocks, BLOCK, kernels=kernels, threads=threads, cores=cores)
        weights = load_native(files.path, files.llama)
        layers = [part for layer in weights.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        read = sum(part.data.nbytes for part in (*layers, weights.head))
        self.about: dict[str, object] = {
            "version": self._runner.path,
            "weights": "Q4_1 and Q8_0 as in the file, times rows of 8 or 16 bits; KV bf16, read as 16-bit numbers",
            "read_bytes": read,
        }
        self._context: dict[int, int] = {}
        self._end: dict[int, int] = {}

    def prefill(self, ids: list[int]) -> float:
        start = perf_counter()
        self._prompt(PROMPT, ids)
        return perf_counter() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        names = [LONG] if batch == 1 and context > 256 else [FIRST + at for at in range(batch)]
        for name in names:
            if self._context.get(name) != context:
                self._prompt(name, prompt(context, name))
                self._context[name] = context
            self._end[name] = context
        start = perf_counter()
        for _ in range(steps):
            items = tuple(StepItem(name, self._end[name], 1, b"", (), True) for name in names)
            self._runner.run(Step(0, items))
            for name in names:
                self._end[name] += 1
        return perf_counter() - start

    def score(self, ids: list[int]) -> float:
        table = tuple(self._tables[PROMPT])
        inputs, scored = array("i", ids[:-1]), array("i", ids[1:])
        item = StepItem(PROMPT, 0, len(inputs), inputs.tobytes(), table, False, scored=scored.tobytes())
        result = self._runner.run(Step(0, (item,), (PROMPT,)))
        found = [token.logprob for token in result.items[0].prompt_logprobs]
        return -math.fsum(found) / len(found)

    def _prompt(self, name: int, ids: list[int]) -> None:
        """Compute a prompt in chunks; the last samples."""
        for begin in range(0, len(ids), CHUNK):
            part = array("i", ids[begin : begin + CHUNK])
            last = begin + CHUNK >= len(ids)
            blocks = () if begin else tuple(self._tables[name])
            item = StepItem(name, begin, len(part), part.tobytes(), blocks, last)
            self._runner.run(Step(0, (item,), () if begin else (name,)))


if __name__ == "__main__":
    answer(lambda: Ours(int(sys.argv[1]), cast(Kernels, sys.argv[2])))
