"""What one rank does in a step, as the sums that step time depends on."""

from __future__ import annotations

import msgspec

from rackserve.base.step import Step


class StepLoad(msgspec.Struct, frozen=True):
    """Work of one rank in one step; all zero: a dummy step.

    num_sequences   sequences in it
    tokens          positions computed, drafts to verify included
    tail_tokens     of those, positions that pass every layer (see `KvLayout.tail_tokens`)
    context_tokens  positions before the computed ones, over all sequences
    attended        sum over computed positions of the positions each attends to, itself among them
    """

    num_sequences: float = 0
    tokens: float = 0
    tail_tokens: float = 0
    context_tokens: float = 0
    attended: float = 0

    @property
    def mean_context(self) -> float:
        """Positions that a computed position attends to, on average."""
        return self.attended / self.tokens if self.tokens else 0.0


def load_of(step: Step) -> StepLoad:
    """The load of a planned step."""
    each = 1 + step.carried_drafts
    tokens = tail = step.carried * each
    attended = step.carried_context * each + step.carried * each * (each + 1) // 2
    for item in step.items:
        count, end = item.num_tokens + item.num_draft, item.start + item.num_tokens + item.num_draft
        tokens += count
        tail += max(0, end - max(item.start, item.full_from))
        attended += count * item.start + count * (count + 1) // 2
    return StepLoad(step.num_sequences, tokens, tail, step.context_tokens, attended)


def decode_load(num_sequences: float, context_tokens: float, per_sequence: int) -> StepLoad:
    """`num_sequences` sequences with `context_tokens` positions altogether, of which each computes `per_sequence` more."""
    tokens = num_sequences * per_sequence
    attended = context_tokens * per_sequence + num_sequences * per_sequence * (per_sequence + 1) / 2
    return StepLoad(num_sequences, tokens, tokens, context_tokens, attended)


def prefill_load(tokens: float, start: float = 0, tail: float | None = None) -> StepLoad:
    """A chunk of one prompt after `start` positions; `tail` of its positions pass every layer (None: all of them)."""
    return StepLoad(1, tokens, tokens if tail is None else tail, start, tokens * start + tokens * (tokens + 1) / 2)
