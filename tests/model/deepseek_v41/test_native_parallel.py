"""Devices that share a model on the native kernels, through mailboxes, against one that has all of it.

Heads, channels and vocabulary that are split make sums of partial sums, in the order of the devices: every device gets the same
bits, in every chunk and company, whatever is done to be quick. They differ from those of one device as other orders of sums do.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from msgspec import structs
from torch import Tensor

from rackserve.base.errors import ConfigError, ResourceError
from rackserve.kernels.cpu import library, v41
from rackserve.kernels.cpu.v41_tuning import ALL_ON, Tuning
from rackserve.model.deepseek_v41.dspark import Drafts
from rackserve.model.deepseek_v41.native import ROUND_ROWS, NativeBackbone, NativeDSpark
from rackserve.model.deepseek_v41.native_plan import make_plan
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.weights import load_weights
from rackserve.model.parallel import Collectives
from rackserve.model.thread_group import ThreadGroup
from tests.model.deepseek_v41.device import NUM_STEPS, logits_of, output_of
from tests.model.deepseek_v41.golden import (
    BLOCK_TOKENS,
    CONFIG,
    FILES,
    PROMPTS,
    Bench,
    Job,
    complete,
    continuation,
    cut,
    prompt,
    same_state,
    vector,
)

FOUND = library.find()
pytestmark = pytest.mark.skipif(FOUND is None or not v41.serves(FOUND), reason="no native kernels were built here")

PLAIN = Tuning(inline_shared=False, early_gathers=False, fused_sums=False)
FoundT = TypeVar("FoundT")


class Pair:
    """The golden model on two devices, threads of this process, and its inside."""

    def __init__(self, threads: int = 1, tuning: Tuning = ALL_ON, options: RunnerOptions | None = None) -> None:
        self._threads, self._tuning, self._options = threads, tuning, options
        self.benches: dict[int, Bench] = {}
        self.group = ThreadGroup(2, self._open)

    def _open(self, collectives: Collectives) -> Any:
        assert FOUND is not None
        bench = self.benches[collectives.share.tp_rank] = Bench(self._options, collectives=collectives, kernels="native")
        weights = load_weights(FILES.path, CONFIG, collectives.share, memory="stored")
        bench.backbone = NativeBackbone(
            FOUND, CONFIG, weights, bench.arena, threads=self._threads, collectives=collectives, tuning=self._tuning
        )
        bench.dspark = NativeDSpark(CONFIG, bench.backbone)
        return bench.runner

    def both(self, action: Callable[[Bench], FoundT]) -> list[FoundT]:
        """What each device finds."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(action, [self.benches[0], self.benches[1]]))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    bench = Bench(kernels="native")
    return {name: bench.through(prompt(name))[0] for name in PROMPTS}


@pytest.fixture(scope="module")
def split(pair: Pair) -> dict[str, Tensor]:
    """Logits of every prompt at once; the long one takes several rounds a layer."""
    assert len(prompt("long")) > ROUND_ROWS
    return {name: pair.both(lambda bench, name=name: bench.through(prompt(name))[0])[0] for name in PROMPTS}  # type: ignore[misc]


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_are_those_of_one_device(split: dict[str, Tensor], alone: dict[str, Tensor], name: str) -> None:
    off = (split[name] - alone[name]).abs().amax(1)[vector(f"{name}_agree")]
    assert 0 < float(off.median()) < 2e-5
    assert int((off > 1e-3).sum()) <= len(off) // 50
    assert torch.equal(split[name].argmax(1), alone[name].argmax(1))


def test_processes_compute_what_threads_do_and_text_and_drafts_are_golden(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "found"
    command = (sys.executable, "-m", "tests.model.deepseek_v41.device", "2", "1", str(path), "native")
    subprocess.run(command, timeout=100, check=True)
    threads = pair.both(lambda bench: logits_of(bench, list(PROMPTS)))
    for computed in torch.load(path, weights_only=False):
        assert all(torch.equal(computed["logits"][name], threads[device][name]) for name in PROMPTS for device in range(2))
        output, verified, _ = computed["output"]
        assert output == continuation("short")[: len(output)]
        assert verified == [0, *[3] * (NUM_STEPS // 2 - 1)]
    assert output_of(pair.group, 0)[0] == output


@pytest.mark.parametrize(("name", "sizes"), [("short", (1,)), ("medium", (6, 1, 17)), ("long", (2, 33, 90))])
def test_chunks_change_no_bit(pair: Pair, split: dict[str, Tensor], name: str, sizes: tuple[int, ...]) -> None:
    (first, state), (second, other) = pair.both(lambda bench: bench.through(prompt(name), sizes, number=4))
    assert torch.equal(first, split[name]) and torch.equal(second, first)
    assert same_state(state, other)


def test_ragged_company_changes_no_bit(pair: Pair, split: dict[str, Tensor]) -> None:
    def side_by_side(bench: Bench) -> list[Tensor]:
        states = [bench.begin(number + 6) for number in range(3)]
        parts = [cut(prompt(name), sizes) for name, sizes in zip(PROMPTS, ((12,), (1, 9), (50,)), strict=True)]
        found: list[list[Tensor]] = [[], [], []]
        for number in range(max(map(len, parts))):
            present = [at for at in range(3) if number < len(parts[at])]
            for at, rows in zip(present, bench.compute(*((states[at], parts[at][number]) for at in present)), strict=True):
                found[at].append(rows)
        return [torch.cat(rows) for rows in found]

    for found in pair.both(side_by_side):
        assert all(torch.equal(rows, split[name]) for rows, name in zip(found, PROMPTS, strict=True))


@pytest.mark.parametrize(
    ("threads", "tuning"),
    [
        (2, ALL_ON),
        (1, PLAIN),
        (2, PLAIN),
        (1, Tuning(inline_shared=False)),
        (1, Tuning(early_gathers=False)),
        (1, Tuning(fused_sums=False)),
    ],
)
def test_neither_threads_nor_tuning_change_a_bit(pair: Pair, split: dict[str, Tensor], threads: int, tuning: Tuning) -> None:
    def work(bench: Bench) -> tuple[Tensor, Drafts]:
        bench.through(prompt("medium"), (9, 1))
        logits, state = bench.through(prompt("medium"), (25,))
        return logits, bench.draft(state, 5)

    other = Pair(threads, tuning)
    _, wanted = pair.both(work)[0]
    for logits, drafts in other.both(work):
        assert torch.equal(logits, split["medium"])
        assert drafts.tokens == wanted.tokens
        assert torch.equal(drafts.logits, wanted.logits) and torch.equal(drafts.confidence, wanted.confidence)


def test_one_device_has_the_same_bits_without_tuning(alone: dict[str, Tensor]) -> None:
    assert FOUND is not None
    bench = Bench(kernels="native")
    weights = load_weights(FILES.path, CONFIG, memory="stored")
    bench.backbone = NativeBackbone(FOUND, CONFIG, weights, bench.arena, tuning=PLAIN)
    assert torch.equal(bench.through(prompt("medium"), (16, 3))[0], alone["medium"])


@pytest.mark.parametrize("name", PROMPTS)
def test_drafts_are_those_of_another_implementation_on_both_devices(pair: Pair, name: str) -> None:
    anchor = continuation(name)[0]
    for drafts in pair.both(lambda bench: bench.draft(bench.through(prompt(name), number=5)[1], anchor)):
        assert drafts.tokens == vector(f"{name}_drafts").tolist()
        assert float((drafts.confidence - vector(f"{name}_confidence_logits")).abs().max()) < 1e-2


def test_early_rows_end_at_the_last_compressor_on_both(pair: Pair) -> None:
    def tail(bench: Bench) -> Tensor:
        state, logits = bench.begin(9), []
        for part in cut(prompt("long"), (90, 7, 103)):
            state.valid[CONFIG.first_decoder_layer :].clamp_(min=150)
            logits += bench.compute((state, part), full_from=150)
        return torch.cat(logits)

    first, second = pair.both(tail)
    assert torch.equal(first, second)
    off = (first - tail(Bench(kernels="native"))).abs().amax(1)
    assert float(off.median()) < 2e-4 and float(off.max()) < 0.5


def test_rounded_inputs_are_rounded_alike_on_both() -> None:
    pair = Pair(options=RunnerOptions(activation_rounding=True))
    first, second = pair.both(lambda bench: complete(bench.runner, Job(prompt("short"), 6, num_draft=3)))
    assert first == second


def test_a_device_that_fails_is_an_error_on_the_other_and_not_a_wait() -> None:
    pair = Pair()

    def run(bench: Bench) -> None:
        if bench is pair.benches[0]:
            bench.compute((bench.begin(), prompt("short")))
        elif isinstance(bench.backbone, NativeBackbone):
            bench.backbone.close()

    with pytest.raises(ResourceError, match="device 0 of 2 did not hear from device 1"):
        pair.both(run)


def test_widths_that_kernels_cannot_cut_are_refused_with_the_remedy() -> None:
    config = structs.replace(CONFIG, vocab_size=520)
    weights = load_weights(FILES.path, CONFIG, memory="stored")
    with pytest.raises(ConfigError, match=r"vocab_size is 520, .* on each of 2 devices; set runner\.kernels to torch"):
        make_plan(config, weights, BLOCK_TOKENS, round_inputs=False, devices=2)
