"""One device's engine for a DeepSeek-V4.1 model: turns a `Step` into a `StepResult`, all items in one pass over the weights."""

from __future__ import annotations

import array
import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.step import ItemResult, Step, StepItem, StepResult, TokenLogprobs
from rackserve.kernels.cpu.v41_tuning import ALL_ON, Tuning
from rackserve.model.deepseek_v41.backbone import Backbone, Layers, Pass
from rackserve.model.deepseek_v41.checkpoint import Checkpoint
from rackserve.model.deepseek_v41.dspark import DraftHead, Drafts, DSpark
from rackserve.model.deepseek_v41.engram.ngrams import NgramHash
from rackserve.model.deepseek_v41.engram.reader import open_engram
from rackserve.model.deepseek_v41.engram.vocabulary import token_map
from rackserve.model.deepseek_v41.layout import kv_layout
from rackserve.model.deepseek_v41.linear import Linear, choose_products
from rackserve.model.deepseek_v41.native import NativeBackbone, NativeDSpark, find_kernels
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.pass_costs import measure_costs
from rackserve.model.deepseek_v41.reads import StepReads
from rackserve.model.deepseek_v41.spans import Span
from rackserve.model.deepseek_v41.speculation import Speculation, wants_drafts
from rackserve.model.deepseek_v41.state import Arena, Proposal, SequenceState
from rackserve.model.deepseek_v41.weights import load_weights
from rackserve.model.files import ModelFiles
from rackserve.model.parallel import Alone, Collectives
from rackserve.model.runner import Kernels
from rackserve.model.sampler import score, token_logprobs
from rackserve.model.sampling_state import Compile, SamplingState, SamplingStates
from rackserve.sched.draft_budget import DraftCosts


class DeepseekV41Runner:
    """Runs steps over blocks and window slots that lie in `arena`, whoever wrote them: this process, a fetch or a push.

    arena        writable memory of at least `num_blocks` blocks of `layout`, then window slots; mapped while the runner lives
    collectives  to the other devices of the group, which must run a step whenever this one does; None: it is alone
    kernels      native: those of `kernels.cpu`, ConfigError where they do not serve; torch; auto: the first that serves
    threads, cores  that share a step of the native kernels, and where they run (see `kernels.cpu.v41`)
    compile_constraint  for requests with a constraint; without it they end as unsupported. With synthetic acceptance nothing
                 but temperature and filters counts
    kernel_ns    time that steps spent computing so far, drafts and waits for the n-gram memory included

    A token depends on its sequence alone: not on chunks, batch, cached prefix or neighbours, and where state is restored
    exactly, not on where it was computed. That needs torch to run on one thread, which is set here for the process.

    FileFormatError if weights are missing or misshapen, ConfigError if the model cannot be split so, InvariantError if the
    arena does not fit.
    """

    def __init__(
        self,
        files: ModelFiles,
        arena: memoryview,
        num_blocks: int,
        block_tokens: int,
        options: RunnerOptions | None = None,
        collectives: Collectives | None = None,
        compile_constraint: Compile | None = None,
        kernels: Kernels = "torch",
        threads: int = 1,
        cores: Sequence[int] = (),
        tuning: Tuning = ALL_ON,
    ) -> None:
        torch.set_num_threads(1)  # more would split a product differently for each number of rows, and round differently
        options, self._collectives = options or RunnerOptions(), collectives or Alone()
        self._config = config = files.deepseek_v41
        self.layout = kv_layout(config, block_tokens, options.resume)
        self._arena = Arena(config, self.layout, arena, num_blocks)
        self._backbone: Layers
        self._dspark: DraftHead
        native = self._native(files, options, kernels, threads, cores, tuning)
        if native is not None:
            checkpoint, self._backbone = native
            self._dspark = NativeDSpark(config, self._backbone)
        else:
            weights = load_weights(files.path, config, self._collectives.share, options.weights)
            checkpoint = weights.checkpoint
            linear = Linear(choose_products(config, weights), round_inputs=options.activation_rounding)
            backbone = Backbone(config, weights, self._arena, linear, self._collectives)
            self._backbone = backbone
            self._dspark = DSpark(config, weights, backbone.embedding, linear, self._collectives)
        self._speculation = Speculation(self._dspark, config.dspark_block_size, options)
        if self._speculation.needs_costs:
            self._speculation.costs = measure_costs(config, self._backbone, self._dspark, self._collectives)
        self._ngrams = NgramHash(config, token_map(files.path, config))
        self.engram = open_engram(checkpoint.location, config, options.engram_owners, options.engram_hot_rows)
        self.kernel_ns = 0
        self._sequences: dict[int, SequenceState] = {}
        self._sampling = SamplingStates(config.vocab_size, compile_constraint)

    def _native(
        self, files: ModelFiles, options: RunnerOptions, kernels: Kernels, threads: int, cores: Sequence[int], tuning: Tuning
    ) -> tuple[Checkpoint, NativeBackbone] | None:
        """The checkpoint and the native layers over it, if they are wanted and can be had."""
        if kernels == "torch":
            return None
        try:
            share, rounding = self._collectives.share, options.activation_rounding
            if share.ep_size > 1:
                raise ConfigError("native kernels do not spread experts over ranks yet; set runner.kernels to torch")
            found = find_kernels()
            weights = load_weights(files.path, self._config, share, memory="stored")
            backbone = NativeBackbone(
                found,
                self._config,
                weights,
                self._arena,
                round_inputs=rounding,
                threads=threads,
                cores=cores,
                collectives=self._collectives,
                tuning=tuning,
            )
            return weights.checkpoint, backbone
        except ConfigError:
            if kernels == "native":
                raise
            return None

    @property
    def path(self) -> str:
        """What computes: an instruction set, or torch."""
        return self._backbone.path

    @property
    def costs(self) -> DraftCosts:
        """What passes cost here, if the draft policy weighs that."""
        return self._speculation.costs

    def run(self, step: Step) -> StepResult:
        """Compute `step`. InvariantError if it names positions, blocks, slots or tokens that cannot be."""
        for number in step.retired:
            self._sequences.pop(number, None)
            self._sampling.forget(number)
        tokens = [self._tokens_of(item) for item in step.items]
        for item in step.items:
            self._check(item)
        states = [self._state_of(item) for item in step.items]
        return StepResult(step.dp_rank, tuple(self._compute(step.items, tokens, states)))

    @torch.inference_mode()
    def _compute(self, items: Sequence[StepItem], tokens: list[list[int]], states: list[SequenceState]) -> list[ItemResult]:
        reads = StepReads(self._ngrams, self.engram, tokens, [state.history for state in states])
        choices = [None if self._speculation.is_synthetic else self._sampling.of(item) for item in items]
        drafts: list[Drafts | None] = [None] * len(items)
        begin = time.monotonic_ns()
        drafting = any(wants_drafts(item) for item in items)
        if self._collectives.share.ep_size > 1:  # the devices of one rank have the same items
            drafting = self._collectives.any(drafting)
        if drafting:
            drafts = self._speculation.draft(items, [ids[-1] for ids in tokens], states, choices)
        self.kernel_ns += time.monotonic_ns() - begin
        drawn = [[] if found is None else found.tokens for found in drafts]
        reads.extend(drawn)
        rows = [[*ids, *more] for ids, more in zip(tokens, drawn, strict=True)]
        firsts = [0, *accumulate(map(len, rows))]
        spans = [
            Span(state, item.start, len(ids), first, item.replayed, item.full_from)
            for item, state, ids, first in zip(items, states, rows, firsts, strict=False)
        ]
        inputs = [token for ids in rows for token in ids]
        begin = time.monotonic_ns()
        done = self._backbone.forward(inputs, spans, reads)
        self.kernel_ns += time.monotonic_ns() - begin
        ends = [first + item.num_tokens for first, item in zip(firsts, items, strict=False)]
        wanted = [range(end - 1, end + len(more)) for item, end, more in zip(items, ends, drawn, strict=True) if item.sample]
        sampled = done.place[[row for part in wanted for row in part]]
        begin = time.monotonic_ns()
        logits = iter(self._backbone.logits(done.hidden[sampled]).split([len(part) for part in wanted]) if wanted else ())
        self.kernel_ns += time.monotonic_ns() - begin
        results = [
            self._result(item, next(logits) if item.sample else None, found, choice)
            for item, found, choice in zip(items, drafts, choices, strict=True)
        ]
        for at, item in enumerate(items):
            if item.scored:
                results[at] = structs.replace(results[at], prompt_logprobs=self._scores(item, done, firsts[at]))
        self._keep(items, states, done.proposals, results)
        return results

    def _scores(self, item: StepItem, done: Pass, begin: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the item's scored tokens. `begin`: its first row of the pass."""

        def logits_of(first: int, end: int) -> Tensor:
            return self._backbone.logits(done.hidden[done.place[begin + first : begin + end]])

        return score(array.array("i", item.scored), item.scored_top, logits_of)

    def _result(self, item: StepItem, logits: Tensor | None, drafts: Drafts | None, choice: SamplingState | None) -> ItemResult:
        """Tokens of an item, from the logits [k + 1, vocab] of its last token and its k drafts."""
        if logits is None:
            return ItemResult(item.sequence, ())
        if not np.isfinite(logits.numpy()).all():  # many times as fast as with torch
            raise InvariantError(
                f"sequence {item.sequence}: logits are not finite; the weights hold numbers that are not (fetch them again), "
                "or a block was read before its KV was written"
            )
        output = self._speculation.accept(item, logits, drafts, choice)
        shares = zip(logits, output, strict=False) if item.logprobs >= 0 else ()
        return ItemResult(
            item.sequence,
            tuple(output),
            tuple(token_logprobs(row, token, item.logprobs) for row, token in shares),
            len(drafts.tokens) if drafts else 0,
            choice.finish if choice is not None else None,
        )

    def _keep(
        self, items: Sequence[StepItem], states: list[SequenceState], proposals: list[Proposal], results: list[ItemResult]
    ) -> None:
        """Take in the state of the positions that stand, and store it where the step says."""
        ends = [
            item.start + item.num_tokens + max(0, len(result.tokens) - 1) for item, result in zip(items, results, strict=True)
        ]
        self._dspark.learn(proposals, [end - item.start for item, end in zip(items, ends, strict=True)])
        for item, state, proposal, result, end in zip(items, states, proposals, results, ends, strict=True):
            at = item.start + item.num_tokens if item.snapshot_at < 0 else item.snapshot_at
            if item.snapshot >= 0 and at <= end:
                state.commit(proposal, at)
                state.store(self._arena.slot(item.snapshot))
            state.commit(proposal, end)
            if item.sample:
                # Where nothing may follow, a step that is planned already computes what nobody reads, from any token.
                state.last_token = result.tokens[-1] if result.tokens else 0

    # ------------------------------------------------------------ what a step says

    def _tokens_of(self, item: StepItem) -> list[int]:
        """Ids of the item's positions; without any, the token sampled last for its sequence."""
        known = self._sequences.get(item.sequence)
        tokens = array.array("i", item.tokens).tolist() if item.tokens else [known.last_token if known else -1]
        if len(tokens) != item.num_tokens:
            raise InvariantError(f"sequence {item.sequence}: {len(tokens)} tokens given for {item.num_tokens} positions")
        if min(tokens) < 0 or max(tokens) >= self._config.vocab_size:
            source = "its tokens lie outside the vocabulary" if item.tokens else "no token was sampled to continue from"
            raise InvariantError(f"sequence {item.sequence}: {source}")
        return tokens

    def _check(self, item: StepItem) -> None:
        """InvariantError if the item does not continue its sequence, or does not fit its blocks."""
        known = self._sequences.get(item.sequence)
        start, end, sequence = item.start, item.start + item.num_tokens, item.sequence
        for slot in (item.restore, item.snapshot):
            if slot >= 0:
                self._arena.slot(slot)
        num_blocks = len(item.new_blocks) + (len(known.blocks) if known else 0)
        last = end + (min(item.num_draft, self._config.dspark_block_size) if wants_drafts(item) else 0)
        if start < 0 or last > min(num_blocks * self._arena.block_tokens, self._config.max_positions):
            room = f"{num_blocks} blocks of {self._arena.block_tokens} and the model's {self._config.max_positions} positions"
            raise InvariantError(f"sequence {sequence}: positions [{start}, {last}) do not fit {room}")
        if any(not 0 <= block < self._arena.num_blocks for block in item.new_blocks):
            raise InvariantError(f"sequence {sequence}: block ids {item.new_blocks} exceed {self._arena.num_blocks} blocks")
        if known is None and start and item.restore < 0 and not item.replayed:
            raise InvariantError(f"sequence {sequence} begins at position {start} with no state to resume from")
        if known is not None and item.restore < 0 and known.length != start:
            raise InvariantError(f"sequence {sequence} stands at position {known.length}, its item begins at {start}")

    def _state_of(self, item: StepItem) -> SequenceState:
        """The sequence's state as of the start of the item, with the item's blocks."""
        state = self._sequences.get(item.sequence)
        history = array.array("i", item.history).tolist()
        if state is None:
            state = self._sequences[item.sequence] = SequenceState(self._config)
            state.begin(item.start, history)
        if item.restore >= 0:
            state.restore(self._arena.slot(item.restore), item.start, history)
        state.blocks += item.new_blocks
        if item.full_from > item.start:
            decoder = state.valid[self._config.first_decoder_layer :]
            decoder.clamp_(min=item.full_from)
        return state
