"""A forward pass, planned (`GroupStep`) and done (`StepResult`)."""

from __future__ import annotations

import msgspec

from rackserve.base.request import SamplingParams


class StepItem(msgspec.Struct, frozen=True):
    """One sequence's share of a step: compute positions [start, start + num_tokens).

    sequence     the engine's name for the sequence; unique on its rank for the life of the rank
    tokens       int32 ids of those positions; empty = the token the engine itself sampled last for this sequence
    new_blocks   block ids appended to the sequence's block table before this item (the whole table so far on first sight)
    sample       draw output after the last position
    output_index how many output tokens of the request precede the one drawn here (names the random draw)
    num_draft    how many draft tokens may be verified; the result then carries 1..num_draft+1 tokens
    restore      window slot to load the resume state from before computing, or -1
    snapshot     window slot to store the resume state to, or -1
    snapshot_at  the position before which that state lies; one that the item reaches only by accepted drafts may be missed,
                 and then the slot is left as it was. -1: the end of the item
    history      int32 ids of the positions before `start`, as many as `KvLayout.history_tokens` if there are; sent with a
                 sequence's first item
    replayed     leading positions whose KV is in the blocks already: computed for the resume state, not written again
    full_from    positions from this one on pass all layers (see `KvLayout.tail_tokens`)
    logprobs     alternatives per drawn token to report log-probabilities of, or -1 for none at all
    context      int32 ids before the drawn token, if the choice depends on them: the last `output_index` are output, and with
                 a repetition penalty the prompt is before them. Sent with the first item of a sequence that samples
    stop_token_ids  what ends the output, if `sampling.min_tokens` rules it out at first
    scored       int32 ids of the tokens after the positions `start`, `start` + 1, ... whose log-probabilities are wanted
    scored_top   alternatives to report for each of those
    """

    sequence: int
    start: int
    num_tokens: int
    tokens: bytes
    new_blocks: tuple[int, ...]
    sample: bool
    output_index: int = 0
    sampling: SamplingParams = SamplingParams()
    num_draft: int = 0
    restore: int = -1
    snapshot: int = -1
    logprobs: int = -1
    snapshot_at: int = -1
    history: bytes = b""
    replayed: int = 0
    full_from: int = 0
    context: bytes = b""
    stop_token_ids: tuple[int, ...] = ()
    scored: bytes = b""
    scored_top: int = 0


class Step(msgspec.Struct, frozen=True):
    """What one rank computes in one forward pass. `retired` sequences are forgotten by the engine before it starts.

    A step without sequences is a dummy step: the rank only keeps its group in lockstep.

    carried          sequences of the step before that go on by one position each without an item; requests without token ids
                     only, as nothing but a count of tokens comes back for them
    carried_context  positions before theirs, over all of them
    carried_drafts   draft tokens to verify for each of them besides that position
    """

    dp_rank: int
    items: tuple[StepItem, ...]
    retired: tuple[int, ...] = ()
    carried: int = 0
    carried_context: int = 0
    carried_drafts: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences that compute something."""
        return len(self.items) + self.carried

    @property
    def num_tokens(self) -> int:
        return sum([item.num_tokens for item in self.items]) + self.carried if self.items else self.carried

    @property
    def context_tokens(self) -> int:
        """Positions before the computed ones, whose KV attention reads."""
        return sum([item.start for item in self.items]) + self.carried_context if self.items else self.carried_context

    @property
    def attended(self) -> int:
        """Sum over all computed positions of the positions each attends to, itself among them."""
        carried = self.carried_context + self.carried
        return carried + sum(item.num_tokens * item.start + item.num_tokens * (item.num_tokens + 1) // 2 for item in self.items)


class GroupStep(msgspec.Struct, frozen=True):
    """The steps of all ranks of a group that run in lockstep: it ends when its slowest rank does.

    tokens   1: one forward pass. n: the engine goes on with the same sequences, each at the token it drew last, while each has
             drawn fewer than n tokens; an interruption ends that earlier, between two passes
    """

    number: int
    steps: tuple[Step, ...]
    tokens: int = 1


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probability of a sampled token and the best alternatives as (token id, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


UNNAMED_TOKEN = 1
"""Stands for each output id of a request that came without token ids."""


CONSTRAINT_DEAD_END = "constraint_dead_end"
CONSTRAINT_INVALID = "constraint_invalid"
UNSUPPORTED = "unsupported"

FAILURES = {
    CONSTRAINT_DEAD_END: "no token of the vocabulary goes on with the output; widen what the request allows",
    CONSTRAINT_INVALID: "the constraint cannot be compiled for this model, or takes too much work; simplify it",
    UNSUPPORTED: "this model cannot do what the request asks for",
}
"""Why output can end before its end, for the request at fault alone: code and text for people."""


class ItemResult(msgspec.Struct, frozen=True):
    """Output tokens of one item: empty unless it sampled, else 1..num_draft+1 accepted tokens for each pass of the step.

    num_verified: draft tokens that were verified, of which len(tokens) - 1 were accepted.

    finish           "stop": the output is complete, whatever comes; or one of FAILURES: nothing comes after `tokens`,
                     which may be empty then
    prompt_logprobs  of the tokens `StepItem.scored`
    """

    sequence: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_verified: int = 0
    finish: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Results of one rank's step, item by item in the order of the step.

    num_passes  forward passes made; drawn: tokens that each carried sequence drew in them
    """

    dp_rank: int
    items: tuple[ItemResult, ...]
    num_passes: int = 1
    drawn: int = 1
