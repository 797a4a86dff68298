"""What does rounding change? Perplexity, likeliest tokens and short answers of the embedded model.

The native path and products with bf16 inputs and outputs (as engines without quantised inputs have them), both beside float32.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec
from measure import Claim, Options, Result, figure, main
from questions import QUESTIONS, Asked, asked, right

HAS_ENGINE = all(find_spec(name) for name in ("torch", "gguf", "safetensors"))
if HAS_ENGINE:
    import torch
    from torch import Tensor

    from rackserve.kernels.cpu import library
    from rackserve.model.attention import Span
    from rackserve.model.files import open_model
    from rackserve.model.kv_arena import KvArena
    from rackserve.model.layout import KvDtype, kv_layout
    from rackserve.model.llama import Llama, load_weights
    from rackserve.model.native import NativeLlama, load_native
    from rackserve.model.products import Products
    from rackserve.text.tokenizer import Tokenizer, unpack

QUESTION = "How far from float32 are the native kernels' rounded inputs, and how far are bf16 inputs?"
CLOCK = "none: compared, one value per text"
ROOT = Path(__file__).parent.parent
TEXTS = ("LICENSE", "README.md", "SECURITY.md", "docs/architecture.md", "rackserve/runs/tree.py", "rackserve/base/step.py")
BLOCK = 16
LENGTH, QUICK_LENGTH = 512, 64
MOST = 1.01
QUICK_QUESTIONS, ANSWER = 2, 12


class Scored(msgspec.Struct):
    """By text: perplexity, and the likeliest token at each position."""

    perplexity: list[float]
    likeliest: list[Tensor]


class _Rounded:
    """Products whose inputs and outputs are rounded to bf16."""

    def __init__(self, products: Products) -> None:
        self.mode = products.mode
        self._products = products

    def mm(self, rows: Tensor, matrix: Tensor) -> Tensor:
        return self._products.mm(rows.bfloat16().float(), matrix).bfloat16().float()


def texts(folder: Path, length: int) -> list[Tensor]:
    """Ids of each text's beginning, one more than positions."""
    tokenizer = Tokenizer.from_folder(folder)
    found = [memoryview(tokenizer.encode((ROOT / name).read_text())).cast("i").tolist()[: length + 1] for name in TEXTS]
    return [torch.tensor(ids) for ids in found if len(ids) == length + 1]


def score(model: Llama | NativeLlama, found: list[Tensor]) -> Scored:
    """Each text as a prompt of its own."""
    scored = Scored([], [])
    for ids in found:
        length = len(ids) - 1
        spans = [Span(list(range(-(-length // BLOCK))), 0, length)]
        with torch.inference_mode():
            logits = model.logits(model.forward(ids[:-1], spans), torch.arange(length))
            chosen = torch.log_softmax(logits, -1)[torch.arange(length), ids[1:]]
        scored.perplexity.append(float(torch.exp(-chosen.mean())))
        scored.likeliest.append(logits.argmax(-1))
    return scored


def answer(model: Llama | NativeLlama, tokenizer: Tokenizer, questions: list[Asked]) -> list[str]:
    """Greedy answers of up to ANSWER tokens."""
    found = []
    for question in questions:
        ids, made, start = torch.tensor(unpack(tokenizer.encode(question.prompt))), list[int](), 0
        while len(made) < ANSWER and (not made or made[-1] not in tokenizer.eos_ids):
            spans = [Span(list(range(-(-(start + len(ids)) // BLOCK))), start, len(ids))]
            with torch.inference_mode():
                logits = model.logits(model.forward(ids, spans), torch.tensor([len(ids) - 1]))
            start += len(ids)
            made.append(int(logits[0].argmax()))
            ids = torch.tensor(made[-1:])
        found.append(tokenizer.decode(made))
    return found


def run(options: Options) -> Result:
    if not HAS_ENGINE:
        return Result("quality", QUESTION, CLOCK, skipped="not run, it needs the engine extra")
    if library.find() is None:
        return Result("quality", QUESTION, CLOCK, skipped="not run, no native kernels were built here")
    files = open_model("embedded")
    config, length = files.llama, QUICK_LENGTH if options.quick else LENGTH
    found = texts(files.path, length)
    blocks = -(-max(length, QUICK_LENGTH * 2) // BLOCK)

    def arena(dtype: KvDtype) -> memoryview:
        return memoryview(bytearray(blocks * kv_layout(config, BLOCK, dtype).block_bytes))

    tokenizer, questions = Tokenizer.from_folder(files.path), asked(QUICK_QUESTIONS if options.quick else len(QUESTIONS))

    def measured(model: Llama | NativeLlama) -> tuple[Scored, list[str]]:
        return score(model, found), answer(model, tokenizer, questions)

    weights = load_weights(files.path, config)
    plain = Llama(weights, KvArena(arena("fp32"), config, blocks, BLOCK, "fp32"))
    exact, exact_answers = measured(plain)
    weights.products = _Rounded(weights.products)  # type: ignore[assignment]
    rounded, rounded_answers = measured(plain)
    native, native_answers = measured(NativeLlama(load_native(files.path, config), arena("bf16"), BLOCK, "bf16"))

    def same(scored: Scored) -> list[float]:
        pairs = zip(scored.likeliest, exact.likeliest, strict=True)
        return [float((mine == theirs).float().mean()) for mine, theirs in pairs]

    def kept(answers: list[str]) -> list[float]:
        return [sum(map(str.__eq__, answers, exact_answers)) / len(answers)]

    def known(answers: list[str]) -> list[float]:
        return [float(right(questions, answers))]

    figures = (
        figure("perplexity, native", "", native.perplexity, "float32", exact.perplexity),
        figure("perplexity, bf16 inputs", "", rounded.perplexity, "float32", exact.perplexity),
        figure("likeliest tokens that are those of float32, native", "of 1", same(native), "bf16 inputs", same(rounded)),
        figure("answers that are those of float32, native", "of 1", kept(native_answers), "bf16 inputs", kept(rounded_answers)),
        figure("right answers, native", "", known(native_answers), "float32", known(exact_answers)),
        figure("right answers, bf16 inputs", "", known(rounded_answers), "float32", known(exact_answers)),
    )
    claims = (
        Claim("perplexity of each text within 1 % of float32", max(figures[0].ratios) <= MOST),
        Claim(
            "in each text at least as many likeliest tokens are those of float32 as with bf16 inputs",
            min(figures[2].ratios) >= 1,
        ),
        Claim("at least as many answers are those of float32 as with bf16 inputs", figures[3].ratios[0] >= 1),
        Claim("no fewer answers are right than with float32", figures[4].ratios[0] >= 1),
    )
    notes = (f"{len(found)} texts of {length:,} tokens.", f"{len(questions)} questions, {ANSWER} greedy tokens each.")
    return Result("quality", QUESTION, CLOCK, claims, figures, notes)


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
