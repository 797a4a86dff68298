"""A request as the control plane sees it: immutable, and named by keys wherever tokens are not needed."""

from __future__ import annotations

from typing import Literal

import msgspec

from rackserve.base.ids import Attempt, Rank
from rackserve.base.keys import Chain

ConstraintKind = Literal["json_schema", "regex", "grammar", "json_object", "choice"]


class Constraint(msgspec.Struct, frozen=True):
    """What the whole output of a request must be. `text` by kind:

    json_schema   a JSON schema, as JSON
    regex         a regular expression
    grammar       a grammar in Lark form
    json_object   "": any JSON object
    choice        a JSON list of strings, one of which is the output
    """

    kind: ConstraintKind
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. It depends on logits, seed, output position and tokens so far alone.

    First the logits are changed, in this order: what `constraint`, `allowed_token_ids`, `bad_words` and `min_tokens` rule out
    becomes minus infinity, `logit_bias` is added, the penalties are taken off. Then the draw: the likeliest, the lowest id
    among equals, or by temperature and filters. Log-probabilities that are reported are those before all of this.

    temperature         0 is greedy
    top_p               the fewest likeliest tokens whose share reaches it; 1: all
    top_k               so many likeliest tokens; 0: all
    min_p               tokens at least this part as likely as the likeliest; 0: all. Filters apply as min_p, top_k, top_p
    presence_penalty    taken off the logit of each token of the output
    frequency_penalty   taken off it for each time it is there
    repetition_penalty  above 0: divides positive logits of tokens of prompt and output, multiplies negative ones; 1: off
    logit_bias          (token id, what is added to its logit, finite), by id
    min_tokens          no stop token among so many output tokens; a constraint that is fulfilled ends the output all the same
    allowed_token_ids   nothing else is drawn, by id; empty: everything may be
    bad_words           id sequences that do not come up whole in the output
    constraint          output ends when it is fulfilled

    Ids outside the vocabulary have no effect.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None

    @property
    def reads_prompt(self) -> bool:
        """Whether the choice depends on what tokens the prompt has."""
        return self.repetition_penalty != 1.0

    @property
    def reads_output(self) -> bool:
        """Whether the choice depends on what tokens have been output."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.reads_prompt
            or self.constraint is not None
            or any(len(word) > 1 for word in self.bad_words)
        )

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters counts."""
        return self.reads_output or bool(self.logit_bias or self.min_tokens or self.allowed_token_ids or self.bad_words)


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a client, or what is left of it after `num_emitted` output tokens have been delivered.

    tokens          prompt ids, int32 little-endian; after a re-placement the delivered output ids are appended
    chain           keys of the full blocks of the prompt (at least; those of later tokens are added where they are computed)
    root            `CacheNamespace.root()` the chain hangs from
    num_tokens      len(tokens) / 4, kept apart so that a simulation may leave `tokens` empty
    max_tokens      output tokens still to make
    num_emitted     output tokens at the tail of `tokens` that the client has already received
    logprobs        alternatives to report with the log-probability of each output token, or -1 for none at all
    prompt_logprobs likewise for each prompt token but the first; they come with the first output token, and no part of the
                    prompt is then taken from a cache
    tenant          whose share of every cache its blocks count towards; chains of two tenants have no key in common
    """

    id: str
    session: str
    tokens: bytes
    chain: Chain
    num_tokens: int
    max_tokens: int
    attempt: int = 1
    num_emitted: int = 0
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1
    root: bytes = b""
    prompt_logprobs: int = -1
    tenant: str = ""

    @property
    def key(self) -> Attempt:
        return (self.id, self.attempt)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the client sent, without delivered output."""
        return self.num_tokens - self.num_emitted

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted and have not been delivered."""
        return self.prompt_logprobs >= 0 and not self.num_emitted


MAX_PROMPT_SCORES = 4_000_000
"""Prompt tokens times (`prompt_logprobs` + 2), at most: they travel in one message."""


class Placement(msgspec.Struct, frozen=True):
    """Where one attempt of a request runs. `cached_tokens` is what the router expects the prefill rank not to compute."""

    request: str
    attempt: int
    prefill: Rank
    decode: Rank
    cached_tokens: int
    booked_tokens: int

    @property
    def key(self) -> Attempt:
        return (self.request, self.attempt)


class Usage(msgspec.Struct, frozen=True):
    """What a finished request used. `cached_tokens` + computed tokens = `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
