"""What the choice of a sequence's next token depends on besides its logits: the tokens so far, and where a constraint stands.

It lives on the rank that draws and is made there from what the sequence's first drawing item brings, so that the choice is the
same wherever a request goes on: behind a prefill rank, after a preemption, in another attempt.
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rackserve.base.errors import InvariantError, RackserveError
from rackserve.base.request import Constraint
from rackserve.base.step import CONSTRAINT_DEAD_END, CONSTRAINT_INVALID, UNSUPPORTED, StepItem


class Matcher(Protocol):
    """A place in what a constraint allows. It begins before the first token of the output."""

    @property
    def is_done(self) -> bool:
        """Whether the output is complete and nothing may follow."""

    def mask(self) -> bytes:
        """What may come next: a bit for each token id, the lowest bit of a byte first; ids beyond its end may not.

        RackserveError if working that out takes too much.
        """

    def accept(self, token: int) -> None:
        """Go on by a token that may come next. RackserveError for one that may not."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""


Compile = Callable[[Constraint], Matcher]
"""Raises RackserveError for a constraint that is none. It and its matchers must depend on nothing but what they are given: the
devices of a rank each have their own, and must come to the same."""


class SamplingState:
    """One sequence's. `finish` is set once nothing can follow: see `ItemResult.finish`.

    item      its first item that samples
    compile_  for constraints; None: this rank can hold none
    """

    __slots__ = ("_allowed", "_bias", "_counts", "_index", "_matcher", "_output", "_prompt", "_sampling", "_stops", "_vocab",
                 "finish")  # fmt: skip

    def __init__(self, item: StepItem, vocab_size: int, compile_: Compile | None) -> None:
        """InvariantError if the item does not bring what its parameters need."""
        self._sampling = sampling = item.sampling
        self._vocab = vocab_size
        self._index = item.output_index
        self.finish: str | None = None
        self._stops = self._ids(item.stop_token_ids)
        self._allowed = self._ids(sampling.allowed_token_ids)
        known = array.array("i", item.context)
        if len(known) < item.output_index and sampling.reads_output:
            raise InvariantError(f"sequence {item.sequence}: {len(known)} of {item.output_index} output tokens were sent")
        split = len(known) - item.output_index if sampling.reads_output else 0
        self._output = known[split:].tolist()
        self._bias = torch.zeros(vocab_size if sampling.logit_bias else 0, dtype=torch.float64)
        for token, value in sampling.logit_bias:
            if 0 <= token < vocab_size:
                self._bias[token] += value
        self._prompt = torch.zeros(vocab_size if sampling.reads_prompt else 0, dtype=torch.bool)
        if sampling.reads_prompt:
            self._prompt[self._ids(known[:split])] = True
        counts = sampling.reads_prompt or sampling.presence_penalty or sampling.frequency_penalty
        self._counts = torch.zeros(vocab_size if counts else 0, dtype=torch.float64)
        if counts:
            self._counts += self._ids(self._output).bincount(minlength=vocab_size)
        self._matcher = self._begin(sampling.constraint, compile_)

    def _ids(self, tokens: tuple[int, ...] | list[int] | array.array[int]) -> Tensor:
        """Those of the vocabulary, int64."""
        return torch.tensor([token for token in tokens if 0 <= token < self._vocab], dtype=torch.int64)

    def _begin(self, constraint: Constraint | None, compile_: Compile | None) -> Matcher | None:
        """The constraint behind the output so far."""
        if constraint is None:
            return None
        if compile_ is None:
            self.finish = UNSUPPORTED
            return None
        failure = CONSTRAINT_INVALID
        try:
            matcher = compile_(constraint)
            failure = CONSTRAINT_DEAD_END
            for token in self._output:
                matcher.accept(token)
        except RackserveError:
            self.finish = failure
            return None
        if matcher.is_done:
            self.finish = "stop"
        return matcher

    def edit(self, logits: Tensor) -> Tensor | None:
        """`logits` [vocab] as the request wants them, float64; None if nothing can follow, and `finish` says why."""
        if self.finish is not None:
            return None
        sampling, edited = self._sampling, logits.to(torch.float64, copy=True)
        if self._matcher is not None:
            try:
                edited.masked_fill_(~_unpacked(self._matcher.mask(), self._vocab), -math.inf)
            except RackserveError:  # of this request alone: the step is others' too
                self.finish = CONSTRAINT_INVALID
                return None
        if sampling.allowed_token_ids:
            only = torch.full_like(edited, -math.inf)
            only[self._allowed] = edited[self._allowed]
            edited = only
        if sampling.bad_words:
            edited[self._ids([word[-1] for word in sampling.bad_words if self._ends_with(word[:-1])])] = -math.inf
        if self._index < sampling.min_tokens:
            edited[self._stops] = -math.inf
        if len(self._bias):
            edited += self._bias
        if len(self._counts):
            self._penalise(edited)
        if float(edited.max()) == -math.inf:
            self.finish = CONSTRAINT_DEAD_END
            return None
        return edited

    def _ends_with(self, word: tuple[int, ...]) -> bool:
        return not word or tuple(self._output[-len(word) :]) == word

    def _penalise(self, logits: Tensor) -> None:
        """Change `logits` in place, only where tokens have been: that is a small part of a vocabulary."""
        sampling, there = self._sampling, self._counts > 0
        if sampling.reads_prompt:
            ids, by = (there | self._prompt).nonzero().flatten(), sampling.repetition_penalty
            found = logits[ids]
            logits[ids] = torch.where(found > 0, found / by, found * by)
        ids = there.nonzero().flatten()
        logits[ids] -= sampling.frequency_penalty * self._counts[ids] + sampling.presence_penalty

    def push(self, token: int) -> None:
        """`token` was drawn from what `edit` returned last."""
        self._index += 1
        self._output.append(token)
        if len(self._counts):
            self._counts[token] += 1
        if self._matcher is not None:
            try:
                self._matcher.accept(token)
            except RackserveError:  # it was allowed, so what comes behind it takes too much: as in `edit`
                self.finish = CONSTRAINT_INVALID
                return
            if self._matcher.is_done:
                self.finish = "stop"

    def pop(self, num_tokens: int) -> None:
        """Take back the tokens pushed last, and what they ended."""
        if not num_tokens:
            return
        self._index -= num_tokens
        for token in self._output[-num_tokens:]:
            if len(self._counts):
                self._counts[token] -= 1
        del self._output[-num_tokens:]
        if self.finish == CONSTRAINT_INVALID:  # of no further use
            return
        if self._matcher is not None:
            self._matcher.rollback(num_tokens)
        self.finish = None


def _unpacked(mask: bytes, size: int) -> Tensor:
    """The first `size` bits as bool [size], False beyond the end."""
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[:size].bool()
    return torch.cat((bits, torch.zeros(size - len(bits), dtype=torch.bool)))


class SamplingStates:
    """Those of a rank, by sequence."""

    __slots__ = ("_compile", "_states", "_vocab")

    def __init__(self, vocab_size: int, compile_: Compile | None = None) -> None:
        self._vocab, self._compile = vocab_size, compile_
        self._states: dict[int, SamplingState] = {}

    def of(self, item: StepItem) -> SamplingState | None:
        """The state of an item's sequence; None if its tokens are drawn by temperature and filters alone."""
        if not item.sample or not item.sampling.changes_logits:
            return None
        state = self._states.get(item.sequence)
        if state is None:
            state = self._states[item.sequence] = SamplingState(item, self._vocab, self._compile)
        return state

    def forget(self, sequence: int) -> None:
        """The sequence is retired."""
        self._states.pop(sequence, None)
