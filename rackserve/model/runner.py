"""One rank's engine: turns a `Step` into a `StepResult` on the CPU, all items in one pass over the weights."""

from __future__ import annotations

import array
import math
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Literal, Protocol

import torch
from msgspec import structs
from torch import Tensor

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.step import ItemResult, Step, StepItem, StepResult, TokenLogprobs
from rackserve.kernels.cpu import library
from rackserve.model.acceptance import verify
from rackserve.model.attention import Span
from rackserve.model.files import ModelFiles
from rackserve.model.kv_arena import KvArena
from rackserve.model.layout import KvDtype, kv_layout
from rackserve.model.llama import Llama, LlamaWeights, load_weights
from rackserve.model.native import NativeLlama, load_native
from rackserve.model.products import Mode
from rackserve.model.sampler import Picks, is_likeliest, likeliest, sample, score, token_logprobs
from rackserve.model.sampling_state import Compile, SamplingStates

Kernels = Literal["auto", "native", "torch"]


class Forward(Protocol):
    """One way to compute. What one call of `forward` or `logits` returns is good until the next of the same."""

    @property
    def products(self) -> Mode: ...

    @property
    def path(self) -> str: ...

    def forward(self, tokens: Tensor, spans: Sequence[Span]) -> Tensor: ...

    def logits(self, hidden: Tensor, wanted: Tensor) -> Tensor: ...


@dataclass(slots=True)
class EngineSequence:
    """What the engine remembers of a sequence between steps: its block table and the token it sampled last (-1: none)."""

    blocks: array.array[int] = field(default_factory=lambda: array.array("i"))
    last_token: int = -1


class LlamaRunner:
    """Runs steps over KV that lies in `arena` alone, whoever wrote it there: this process, a fetch or a push.

    arena    writable memory of at least `num_blocks` blocks of `layout`, kept mapped while the runner lives
    dtype    how KV is stored; computing is float32 either way
    weights  those of another runner in this process that computes with torch, to hold them once
    kernels  native: the kernels of `kernels.cpu`, ConfigError where they do not serve; torch; auto: the faster that serves
    compile_constraint  for requests with a constraint; without it they end as unsupported
    threads, cores  that share a step of the native kernels, and where they run (see `kernels.cpu.decoder`)
    kernel_ns  time that steps spent computing so far: all but making their inputs, the draws, and scores of prompts

    A token depends on its sequence alone: not on chunks, batch, cached prefix or neighbours. With torch that needs one
    thread, which is set here for the process. The runner drafts nothing: an item that samples returns one token whatever its
    `num_draft`. The model has no window state: `restore` and `snapshot` must be -1.

    FileFormatError if weights are missing or misshapen, ConfigError if the arena does not fit.
    """

    __slots__ = ("_arena", "_config", "_dtype", "_llama", "_sampling", "_sequences", "kernel_ns", "layout", "weights")

    def __init__(
        self,
        files: ModelFiles,
        arena: memoryview | mmap.mmap,
        num_blocks: int,
        block_tokens: int,
        dtype: KvDtype = "bf16",
        weights: LlamaWeights | None = None,
        compile_constraint: Compile | None = None,
        kernels: Kernels = "torch",
        threads: int = 1,
        cores: Sequence[int] = (),
    ) -> None:
        torch.set_num_threads(1)  # more would split a product differently for each number of rows, and round differently
        self._config = files.llama
        self.layout = kv_layout(files.llama, block_tokens, dtype)
        self._dtype = dtype
        self._arena = KvArena(arena, files.llama, num_blocks, block_tokens, dtype)
        self.weights = weights
        self._llama: Forward = self._native(files, arena, kernels, threads, cores) or Llama(self._loaded(files), self._arena)
        self.kernel_ns = 0
        self._sequences: dict[int, EngineSequence] = {}
        self._sampling = SamplingStates(files.llama.vocab_size, compile_constraint)

    def _native(
        self, files: ModelFiles, arena: memoryview | mmap.mmap, kernels: Kernels, threads: int, cores: Sequence[int]
    ) -> Forward | None:
        """The native forward pass, if it is wanted and can be had."""
        if kernels == "torch" or (kernels == "auto" and (library.find() is None or library.slower_for_llama())):
            return None
        try:
            native = load_native(files.path, files.llama)
            return NativeLlama(native, arena, self._arena.block_tokens, self._dtype, threads, cores)
        except ConfigError:
            if kernels == "native":
                raise
            return None

    def _loaded(self, files: ModelFiles) -> LlamaWeights:
        self.weights = self.weights or load_weights(files.path, files.llama)
        return self.weights

    @property
    def path(self) -> str:
        """What computes: an instruction set, or torch."""
        return self._llama.path

    @property
    def products(self) -> Mode:
        """How matrix products are computed here, so that rows do not depend on each other."""
        return self._llama.products

    def time_stages(self, on: bool) -> None:
        """Begin to count where native steps spend their time, from zero on; or end it. Nothing with torch."""
        if isinstance(self._llama, NativeLlama):
            self._llama.time_stages(on)

    def stage_times(self) -> dict[str, float]:
        """CPU seconds of the calling thread by stage of native steps; empty with torch."""
        return self._llama.stage_times() if isinstance(self._llama, NativeLlama) else {}

    def run(self, step: Step) -> StepResult:
        """Compute `step`. InvariantError if it names positions, blocks or tokens that cannot be; no state changes then."""
        for number in step.retired:
            self._sequences.pop(number, None)
            self._sampling.forget(number)
        # Rows of one token come first, as the attention plan wants them.
        order = sorted(range(len(step.items)), key=lambda at: step.items[at].num_tokens > 1)
        items = [step.items[at] for at in order]
        tokens = [token for item in items for token in self._tokens_of(item)]
        for item in items:
            self._check(item)
        for item in items:
            if item.sequence not in self._sequences:
                self._sequences[item.sequence] = EngineSequence()
            if item.new_blocks:
                self._sequences[item.sequence].blocks.extend(item.new_blocks)
        results = self._compute(items, tokens) if items else []
        placed = dict(zip(order, results, strict=True))
        return StepResult(step.dp_rank, tuple(placed[at] for at in range(len(items))))

    def _compute(self, items: Sequence[StepItem], tokens: Sequence[int]) -> list[ItemResult]:
        spans = [Span(self._sequences[item.sequence].blocks, item.start, item.num_tokens) for item in items]
        ends = list(accumulate([item.num_tokens for item in items]))
        # Rows whose logits are read come first; of the others the likeliest token is all that is asked for.
        read: list[int] = []
        plain: list[int] = []
        for at, item in enumerate(items):
            if item.sample:
                (plain if is_likeliest(item) else read).append(at)
        chosen = read + plain
        hidden, rows, picks = self._pass(tokens, spans, [ends[at] - 1 for at in chosen], len(read))
        results = [ItemResult(item.sequence, ()) for item in items]
        for at, row, token, peak in zip(chosen, rows, picks.tokens, picks.logits, strict=True):
            results[at] = self._result(items[at], row, token, peak)
        for at, item in enumerate(items):
            if item.scored:
                results[at] = structs.replace(results[at], prompt_logprobs=self._scores(item, hidden, ends[at] - 1))
        return results

    def _pass(
        self, tokens: Sequence[int], spans: Sequence[Span], wanted: Sequence[int], num_read: int
    ) -> tuple[Tensor, Sequence[Tensor | None], Picks]:
        """Hidden states, the logits of each of rows `wanted`, None after the first `num_read`, and their likeliest tokens."""
        begin = time.monotonic_ns()
        if isinstance(self._llama, NativeLlama):  # without torch, whose calls are slow right after a pass, out of all caches
            hidden = self._llama.forward(tokens, spans)
            found, picks = self._llama.pick(wanted, num_read)
            logits = torch.from_numpy(found).unbind() if num_read else ()
        else:
            with torch.inference_mode():
                hidden = self._llama.forward(torch.tensor(tokens, dtype=torch.int64), spans)
                every = self._llama.logits(hidden, torch.tensor(wanted, dtype=torch.int64))
                picks, logits = likeliest(every), every[:num_read].unbind()
        self.kernel_ns += time.monotonic_ns() - begin
        return hidden, [*logits, *repeat(None, len(wanted) - num_read)], picks

    def _result(self, item: StepItem, logits: Tensor | None, best: int, peak: float) -> ItemResult:
        """`best`: the likeliest token, which is the output where there are no `logits`; `peak`: its logit."""
        # A NaN counts as the largest, and a state that overflowed gives infinities of both signs: the peak tells of the row.
        if not math.isfinite(peak):
            raise InvariantError(
                f"sequence {item.sequence}: logits are not finite; the weights hold numbers that are not (fetch them again), "
                "or a block was read before its KV was written"
            )
        if logits is not None:
            return self._drawn(item, logits, best)
        self._sequences[item.sequence].last_token = best
        return ItemResult(item.sequence, (best,))

    @torch.inference_mode()
    def _drawn(self, item: StepItem, logits: Tensor, best: int) -> ItemResult:
        state = self._sampling.of(item)
        if state is None:
            drawn = item.sampling.temperature > 0.0
            tokens = [sample(logits, item.sampling, item.output_index) if drawn else best]
        else:
            tokens = verify(logits[None], [], None, item.sampling, item.output_index, state)
        # Where nothing may follow, a step that is planned already computes what nobody reads, from any token.
        self._sequences[item.sequence].last_token = tokens[0] if tokens else 0
        scores = tuple(token_logprobs(logits, token, item.logprobs) for token in tokens) if item.logprobs >= 0 else ()
        return ItemResult(item.sequence, tuple(tokens), scores, finish=state.finish if state is not None else None)

    @torch.inference_mode()
    def _scores(self, item: StepItem, hidden: Tensor, last: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the item's scored tokens. `last`: its last row in `hidden`."""
        begin = last + 1 - item.num_tokens
        tokens = array.array("i", item.scored)
        return score(
            tokens, item.scored_top, lambda first, end: self._llama.logits(hidden, torch.arange(begin + first, begin + end))
        )

    def _tokens_of(self, item: StepItem) -> Sequence[int]:
        """Ids of the item's positions; without any, the token sampled last for its sequence."""
        known = self._sequences.get(item.sequence)
        if not item.tokens and item.num_tokens == 1 and known is not None and known.last_token >= 0:
            return (known.last_token,)
        tokens = array.array("i", item.tokens) if item.tokens else array.array("i", [-1])
        if len(tokens) != item.num_tokens:
            raise InvariantError(f"sequence {item.sequence}: {len(tokens)} tokens given for {item.num_tokens} positions")
        if min(tokens) < 0 or max(tokens) >= self._config.vocab_size:
            source = "its tokens lie outside the vocabulary" if item.tokens else "no token was sampled to continue from"
            raise InvariantError(f"sequence {item.sequence}: {source}")
        return tokens

    def _check(self, item: StepItem) -> None:
        """InvariantError if the item does not fit the blocks of its sequence and its own."""
        known = self._sequences.get(item.sequence)
        num_blocks = len(item.new_blocks) + (len(known.blocks) if known else 0)
        end = item.start + item.num_tokens
        if item.restore != -1 or item.snapshot != -1:
            raise InvariantError(f"sequence {item.sequence}: window slots named, but the model has no window state")
        if item.start < 0 or end > min(num_blocks * self._arena.block_tokens, self._config.max_positions):
            room = f"{num_blocks} blocks of {self._arena.block_tokens} and the model's {self._config.max_positions} positions"
            raise InvariantError(f"sequence {item.sequence}: positions [{item.start}, {end}) do not fit {room}")
        if item.new_blocks and any(not 0 <= block < self._arena.num_blocks for block in item.new_blocks):
            raise InvariantError(
                f"sequence {item.sequence}: block ids {item.new_blocks} exceed {self._arena.num_blocks} blocks"
            )
