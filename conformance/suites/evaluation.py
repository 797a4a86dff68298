"""lm-eval over /v1/completions with three tasks of ours; its log-likelihoods are held against the model by the textbook."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from conformance.cases import Case, Pins, Rack, Site, Suite, SuiteError, case
from rackserve.model.files import ModelFiles, open_model
from rackserve.text.tokenizer import Tokenizer
from tests.model.tiny import naive_logits

TASKS = Path(__file__).parent.parent / "tasks"
NAMES = ("capitals_generate", "capitals_loglikelihood", "capitals_choice")
PER_TOKEN = 0.001
"""Nats a token by which a log-likelihood may be off in float32. The native kernels, which compute with the weights' original
blocks and round activations, are further off."""

Samples = list[dict[str, Any]]


def run(site: Site) -> list[Case]:
    """All three tasks in one run, prompts sent as token ids of the model's own tokenizer."""
    rack = site.rack("exact")
    files = open_model("embedded")
    shutil.copytree(TASKS, site.scratch / "tasks")
    settings = {
        "model": rack.model, "base_url": f"{rack.url}/v1/completions", "tokenizer": files.path,
        "tokenizer_backend": "huggingface", "num_concurrent": 2, "max_retries": 1, "max_length": 2048,
    }  # fmt: skip
    words = ["--model", "local-completions", "--model_args", ",".join(f"{name}={value}" for name, value in settings.items())]
    words += ["--include_path", "tasks", "--tasks", ",".join(NAMES), "--output_path", "out", "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(site.scratch / "hf")}
    done = site.run([site.programs / "lm-eval", "run", *words], **offline)
    if done.returncode:
        raise SuiteError(f"lm-eval: {done.stderr[-500:]}")
    found = {name: _samples(site.scratch / "out", name) for name in NAMES}
    answers = {each["doc"]["question"]: each["resps"][0][0] for each in found["capitals_generate"]}
    ours = {question: _complete(rack, question) for question in answers}
    right = [each["acc"] for each in found["capitals_choice"]]
    cases = [
        case("generate_until: what a greedy completion says", answers == ours, [answers, ours]),
        case("multiple_choice: most are right", sum(right) >= 0.75 * len(right), right),
    ]
    scored = [pair for name in NAMES[1:] for sample in found[name] for pair in _pairs(sample)]
    reference = _Reference(files)
    off = [(abs(score - reference.score(*pair)) / reference.length(*pair), pair) for *pair, score, _ in scored]
    worst = max(off)
    text = f"log-likelihoods are within {PER_TOKEN} nats a token of the textbook's, in float64"
    greedy = [is_greedy for _, _, _, is_greedy in scored]
    wanted = [reference.is_greedy(context, more) for context, more, _, _ in scored]
    return [
        *cases,
        case(text, worst[0] <= PER_TOKEN, worst),
        case("whether they are greedy is as by the textbook", greedy == wanted),
    ]


def _samples(folder: Path, task: str) -> Samples:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _pairs(sample: dict[str, Any]) -> Iterable[tuple[str, str, float, bool]]:
    """(context, continuation, its log-likelihood, whether it is greedy) of each question that was asked for a sample."""
    for arguments, (response,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
        yield arguments["arg_0"], arguments["arg_1"], float(response[0]), str(response[1]) == "True"


def _complete(rack: Rack, question: str) -> str:
    body = {"prompt": question, "max_tokens": 8, "temperature": 0, "stop": ["\n"]}
    answer = httpx.post(f"{rack.url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
    return str(answer.json()["choices"][0]["text"])


class _Reference:
    """The model's file, multiplied out in float64 without any of the engine's code."""

    def __init__(self, files: ModelFiles) -> None:
        self._tensors = {name: stored.double() for name, stored in load_file(files.path / "model.safetensors").items()}
        self._config = files.llama
        self._tokenizer = Tokenizer.from_folder(files.path)
        self._known: dict[tuple[str, str], tuple[float, bool, int]] = {}

    def score(self, context: str, more: str) -> float:
        return self._look(context, more)[0]

    def is_greedy(self, context: str, more: str) -> bool:
        return self._look(context, more)[1]

    def length(self, context: str, more: str) -> int:
        """Tokens of the continuation."""
        return self._look(context, more)[2]

    def _ids(self, text: str) -> list[int]:
        return memoryview(self._tokenizer.encode(text)).cast("i").tolist()

    def _look(self, context: str, more: str) -> tuple[float, bool, int]:
        if (context, more) not in self._known:
            ids = self._ids(context + more)
            begin = len(self._ids(context))
            logs = naive_logits(self._tensors, ids, self._config).log_softmax(-1)[begin - 1 : -1]
            wanted = torch.tensor(ids[begin:])
            score = float(logs.gather(-1, wanted[:, None]).sum())
            self._known[context, more] = score, bool((logs.argmax(-1) == wanted).all()), len(wanted)
        return self._known[context, more]


PINS = Pins("pip", ("lm-eval[api]==0.4.13", "transformers==5.24.0"), "lm-eval")

SUITES = (Suite("lm-eval", "lm-eval with tasks of ours", run, PINS, 400.0),)
