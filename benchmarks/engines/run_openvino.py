"""OpenVINO GenAI to compare with: `VENV/bin/python run_openvino.py THREADS FILE.gguf`, by its continuous batching."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import openvino as ov
import openvino_genai as genai
from answer import answer, prompt

SPARE = 8


class OpenVino:
    def __init__(self, threads: int, model: str) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = 4_096
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._number = 0
        weights = "the file's blocks as converted by it, times what its CPU plugin takes (8 bits by default)"
        self.about: dict[str, object] = {"version": genai.__version__, "weights": weights}

    def prefill(self, ids: list[int]) -> float:
        start = perf_counter()
        self._until([self._ask(ids, 1)], lambda made: False)
        return perf_counter() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        """The prompts' blocks are in its prefix cache after the first time. What counts begins once all are generating."""
        handles = [self._ask(prompt(context, at + 2), steps + SPARE) for at in range(batch)]
        made = self._until(handles, lambda made: min(made) > 1)
        begun, start = sum(made), perf_counter()
        made = self._until(handles, lambda made: sum(made) >= begun + batch * steps, made)
        spent = perf_counter() - start
        done = sum(made) - begun
        self._until(handles, lambda made: False, made)
        return spent * batch * steps / done

    def score(self, ids: list[int]) -> float | None:
        return None

    def _ask(self, ids: list[int], count: int) -> object:
        self._number += 1
        config = genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        return self._pipeline.add_request(self._number, ov.Tensor(np.array([ids], np.int64)), config)

    def _until(
        self, handles: Sequence[object], enough: Callable[[list[int]], bool], made: list[int] | None = None
    ) -> list[int]:
        """Run steps until there is `enough`, or nothing left to do; tokens made so far, by request."""
        made = made or [0] * len(handles)
        while self._pipeline.has_non_finished_requests() and not enough(made):
            self._pipeline.step()
            for at, handle in enumerate(handles):
                if handle.can_read():
                    made[at] += sum(len(output.generated_ids) for output in handle.read().values())
        return made


if __name__ == "__main__":
    answer(lambda: OpenVino(int(sys.argv[1]), sys.argv[2]))
