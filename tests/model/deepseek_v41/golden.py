"""The golden checkpoint, its vectors and ways to run sequences through it. Bytes that nobody wrote are codes of NaN."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rackserve.base.request import SamplingParams
from rackserve.base.step import ItemResult, Step, StepItem
from rackserve.model.deepseek_v41.dspark import Drafting, Drafts
from rackserve.model.deepseek_v41.layout import kv_layout
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.reads import StepReads
from rackserve.model.deepseek_v41.runner import DeepseekV41Runner
from rackserve.model.deepseek_v41.spans import Span
from rackserve.model.deepseek_v41.state import Arena, SequenceState
from rackserve.model.deepseek_v41.weights import Weights, load_weights
from rackserve.model.files import open_model
from rackserve.model.parallel import Collectives
from rackserve.model.products import Products
from rackserve.model.runner import Kernels

FILES = open_model("golden")
CONFIG = FILES.deepseek_v41
PROMPTS = ("short", "medium", "long")
BLOCK_TOKENS = 32
BLOCKS_EACH = 8
"""Blocks of one sequence: the longest prompt and what is generated from it."""

NUM_BLOCKS = 18 * BLOCKS_EACH
NUM_SLOTS = 6
LAYOUT = kv_layout(CONFIG, BLOCK_TOKENS)


@cache
def vectors() -> dict[str, np.ndarray]:
    """Arrays made by other implementations."""
    with np.load(FILES.path / "golden.npz") as archive:
        return dict(archive)


def prompt(name: str) -> list[int]:
    ids: list[int] = vectors()[f"{name}_ids"].tolist()
    return ids


def continuation(name: str) -> list[int]:
    """The 24 tokens that follow a prompt at temperature 0."""
    ids: list[int] = vectors()[f"{name}_greedy"].tolist()
    return ids


def vector(name: str) -> Tensor:
    return torch.tensor(vectors()[name])


@cache
def weights() -> Weights:
    return load_weights(FILES.path, CONFIG)


def linear() -> Linear:
    """Products as they come: for tests in which rows need not be bit-equal."""
    return Linear(Products("direct"), round_inputs=False)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers, the same on every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def poisoned(num_blocks: int = NUM_BLOCKS, num_slots: int = NUM_SLOTS) -> bytearray:
    """Memory of an arena; as e4m3, as a scale or as float32, every value in it is NaN or infinite."""
    return bytearray(b"\xff" * (num_blocks * LAYOUT.block_bytes + num_slots * LAYOUT.window_bytes))


def open_arena(memory: bytearray, num_blocks: int = NUM_BLOCKS) -> Arena:
    return Arena(CONFIG, LAYOUT, memoryview(memory), num_blocks)


class Bench:
    """The golden model on one device, and its inside: logits, drafts and state, pass by pass."""

    def __init__(
        self,
        options: RunnerOptions | None = None,
        memory: bytearray | None = None,
        collectives: Collectives | None = None,
        kernels: Kernels = "torch",
        threads: int = 1,
    ) -> None:
        self.memory = poisoned() if memory is None else memory
        self.runner = DeepseekV41Runner(
            FILES, memoryview(self.memory), NUM_BLOCKS, BLOCK_TOKENS, options, collectives, kernels=kernels, threads=threads
        )
        self.backbone, self.dspark = self.runner._backbone, self.runner._dspark
        self.arena = self.runner._arena

    def poison(self) -> None:
        memoryview(self.memory)[:] = poisoned()

    def poison_blocks(self, number: int) -> None:
        """Make what lies in the blocks of one sequence unreadable."""
        for block in table(number):
            begin = block * LAYOUT.block_bytes
            self.memory[begin : begin + LAYOUT.block_bytes] = b"\xff" * LAYOUT.block_bytes

    def begin(self, number: int = 0) -> SequenceState:
        """A new sequence in blocks of its own."""
        state = SequenceState(CONFIG)
        state.begin(0, [])
        state.blocks = list(range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH))
        return state

    def reads(self, tokens: list[list[int]], histories: list[list[int]]) -> StepReads:
        """Engram rows on their way for a pass over `tokens`."""
        return StepReads(self.runner._ngrams, self.runner.engram, tokens, histories)

    def compute(self, *parts: tuple[SequenceState, Sequence[int]], replayed: int = 0, full_from: int = 0) -> list[Tensor]:
        """One pass over the next ids of each sequence, which stand: their logits [n, vocab] (of the last layers' rows)."""
        tokens = [list(ids) for _, ids in parts]
        reads = self.reads(tokens, [state.history for state, _ in parts])
        firsts = [0, *accumulate(map(len, tokens))]
        spans = [
            Span(state, state.length, len(ids), first, replayed, full_from)
            for (state, _), ids, first in zip(parts, tokens, firsts, strict=False)
        ]
        with torch.inference_mode():
            done = self.backbone.forward([token for ids in tokens for token in ids], spans, reads)
            logits = self.backbone.logits(done.hidden)
            self.dspark.learn(done.proposals, [len(ids) for ids in tokens])
        for (state, _), proposal in zip(parts, done.proposals, strict=True):
            state.commit(proposal, proposal.end)
        return [logits[done.place[span.rows][done.place[span.rows] >= 0]] for span in spans]

    def through(self, ids: Sequence[int], sizes: Sequence[int] = (), number: int = 0) -> tuple[Tensor, SequenceState]:
        """Logits of all positions of a new sequence, in chunks of `sizes` over and over, or at once."""
        state, logits = self.begin(number), []
        for part in cut(ids, sizes):
            logits += self.compute((state, part))
        return torch.cat(logits), state

    def draft(self, state: SequenceState, anchor: int) -> Drafts:
        with torch.inference_mode():
            return self.dspark.draft([Drafting(state, anchor, SamplingParams(), 0)])[0]

    def global_rows(self, state: SequenceState) -> list[Tensor]:
        """The packed rows that the first `state.length` positions have in the blocks, source by source."""
        blocks = torch.tensor(state.blocks)
        return [
            self.arena.read(kind, source, blocks, torch.arange(state.length // CONFIG.compress_ratios[source]))
            for source in CONFIG.kv_source_layer_ids
            for kind in ("main", "index")
        ]


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """`ids` in pieces of `sizes`, over and over; in one piece without any."""
    pieces, at, number = [], 0, 0
    while at < len(ids):
        size = sizes[number % len(sizes)] if sizes else len(ids)
        pieces.append(list(ids[at : at + size]))
        at, number = at + size, number + 1
    return pieces


def same_state(a: SequenceState, b: SequenceState) -> bool:
    """Whether two sequences resume alike, to the last bit."""
    first = torch.stack([state.valid.clamp(min=state.length - CONFIG.sliding_window) for state in (a, b)])
    there = [
        torch.cat([state.before(layer, torch.arange(int(low), state.length))[0] for layer, low in enumerate(first[0])])
        for state in (a, b)
    ]
    pending = a.length % 2 == 0 or torch.equal(a.open, b.open)
    return (
        a.length == b.length
        and a.history == b.history
        and pending
        and torch.equal(first[0], first[1])
        and torch.equal(there[0], there[1])
    )


def ids_of(tokens: Sequence[int]) -> bytes:
    """Ids as a step carries them."""
    return array("i", tokens).tobytes()


def item(sequence: int, start: int, tokens: Sequence[int] = (), blocks: Sequence[int] = (), **fields: object) -> StepItem:
    """An item that computes `tokens`, or the token sampled last."""
    given = {"sample": True} | fields
    return StepItem(sequence, start, max(1, len(tokens)), ids_of(tokens), tuple(blocks), **given)  # type: ignore[arg-type]


def run(runner: DeepseekV41Runner, *items: StepItem, retired: tuple[int, ...] = ()) -> tuple[ItemResult, ...]:
    return runner.run(Step(0, items, retired)).items


def table(number: int = 0) -> tuple[int, ...]:
    """The blocks of sequence `number`."""
    return tuple(range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH))


@dataclass(slots=True)
class Job:
    """A sequence to complete: `ids` in chunks of `sizes`, then `num_tokens` of output, `num_draft` drafts at a time."""

    ids: list[int]
    num_tokens: int
    sizes: tuple[int, ...] = ()
    num_draft: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output: list[int] = field(default_factory=list)
    verified: int = 0

    def next(self, sequence: int, at: int, blocks: Sequence[int]) -> StepItem:
        """The item that continues at position `at`."""
        if at < len(self.ids):
            begin = 0
            for piece in cut(self.ids, self.sizes):
                if begin >= at:
                    break
                begin += len(piece)
            last = at + len(piece) == len(self.ids)
            return item(sequence, at, piece, () if at else blocks, sample=last, sampling=self.sampling)
        drafts = min(self.num_draft, self.num_tokens - len(self.output) - 1)
        index = len(self.output)
        return item(sequence, at, output_index=index, num_draft=drafts, sampling=self.sampling)


def complete(runner: DeepseekV41Runner, *jobs: Job, first: int = 0) -> list[list[int]]:
    """The output of all jobs, computed side by side in the same steps, as sequences `first` and on."""
    at = [0] * len(jobs)
    while open_ := [number for number, job in enumerate(jobs) if len(job.output) < job.num_tokens]:
        items = [jobs[number].next(first + number, at[number], table(number)) for number in open_]
        for number, sent, result in zip(open_, items, run(runner, *items), strict=True):
            jobs[number].output += result.tokens
            jobs[number].verified += result.num_verified
            at[number] += sent.num_tokens + max(0, len(result.tokens) - 1)
    run(runner, retired=tuple(range(first, first + len(jobs))))
    return [job.output for job in jobs]


def decode(
    runner: DeepseekV41Runner, sequence: int, start: int, done: Sequence[int], num_tokens: int, num_draft: int = 0
) -> list[int]:
    """Go on with a sequence up to `num_tokens` of output at temperature 0, of which `done` are there, the last at `start`."""
    output = list(done)
    while len(output) < num_tokens:
        drafts = min(num_draft, num_tokens - len(output) - 1)
        (result,) = run(runner, item(sequence, start, output_index=len(output), num_draft=drafts))
        output += result.tokens
        start += len(result.tokens)
    return output
