"""vLLM's CPU engine to compare with: `VENV/bin/python run_vllm.py THREADS MODEL DTYPE`, its engine in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from time import perf_counter

from answer import answer, prompt

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
SPARE = 8


class Vllm:
    def __init__(self, threads: int, model: str, dtype: str) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
        import vllm

        self._llm = vllm.LLM(
            model=model, dtype=dtype, max_model_len=4_096, max_num_batched_tokens=4_096, max_num_seqs=64, seed=0
        )
        self._engine = self._llm.llm_engine
        self._params = vllm.SamplingParams
        self._number = 1_000
        self.about: dict[str, object] = {"version": vllm.__version__, "weights": f"{dtype} throughout"}

    def prefill(self, ids: list[int]) -> float:
        start = perf_counter()
        self._ask(ids, 1)
        self._until(lambda made: False)
        return perf_counter() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        """The prompts' blocks are in its prefix cache after the first time. What counts begins once all are generating."""
        for at in range(batch):
            self._ask(prompt(context, at + 2), steps + SPARE)
        names = self._until(lambda made: len(made) == batch and min(made.values()) > 1)
        begun, start = sum(names.values()), perf_counter()
        names = self._until(lambda made: sum(made.values()) >= begun + batch * steps, names)
        spent = perf_counter() - start
        done = sum(names.values()) - begun
        self._until(lambda made: False, names)
        return spent * batch * steps / done

    def score(self, ids: list[int]) -> float:
        params = self._params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        found = self._llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].prompt_logprobs
        values = [entry[token].logprob for token, entry in zip(ids[1:], found[1:], strict=True)]
        return -sum(values) / len(values)

    def _ask(self, ids: list[int], count: int) -> None:
        self._number += 1
        params = self._params(max_tokens=count, temperature=0.0, ignore_eos=True)
        self._engine.add_request(str(self._number), {"prompt_token_ids": ids}, params)

    def _until(self, enough: Callable[[dict[str, int]], bool], made: dict[str, int] | None = None) -> dict[str, int]:
        """Run steps until there is `enough`, or nothing left to do; tokens made so far, by request."""
        made = made or {}
        while self._engine.has_unfinished_requests() and not enough(made):
            for output in self._engine.step():
                made[output.request_id] = len(output.outputs[0].token_ids)
        return made


if __name__ == "__main__":
    answer(lambda: Vllm(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
