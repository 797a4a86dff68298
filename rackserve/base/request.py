"""A request as the control plane sees it: immutable, and named by keys wherever tokens are not needed."""

from __future__ import annotations

import msgspec

from rackserve.base.ids import Attempt, Rank
from rackserve.base.keys import Chain


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. `temperature` 0 is greedy; the draw depends on (seed, output position) alone."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a client, or what is left of it after `num_emitted` output tokens have been delivered.

    tokens          prompt ids, int32 little-endian; after a re-placement the delivered output ids are appended
    chain           keys of the full blocks of the prompt (at least; those of later tokens are added where they are computed)
    root            `CacheNamespace.root()` the chain hangs from
    num_tokens      len(tokens) / 4, kept apart so that a simulation may leave `tokens` empty
    max_tokens      output tokens still to make
    num_emitted     output tokens at the tail of `tokens` that the client has already received
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

    @property
    def key(self) -> Attempt:
        return (self.id, self.attempt)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the client sent, without delivered output."""
        return self.num_tokens - self.num_emitted


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
