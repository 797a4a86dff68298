"""A request's mutable state on one rank, and the table of state changes that are allowed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Attempt
from rackserve.base.keys import TOKEN_BYTES, Chain, count, extend_chain
from rackserve.base.request import Placement, Request
from rackserve.base.step import TokenLogprobs
from rackserve.kv.rank_cache import Lease

State = Literal["queued", "fetching", "ready", "running", "pushing", "reserved", "receiving", "done", "aborted", "preempted"]

TRANSITIONS: dict[State, tuple[State, ...]] = {
    # prefill
    "queued": ("fetching", "ready", "aborted"),
    "fetching": ("ready", "aborted"),
    "ready": ("running", "aborted", "preempted"),
    "running": ("ready", "pushing", "done", "aborted", "preempted"),
    "pushing": ("done", "aborted"),
    # decode
    "reserved": ("receiving", "aborted"),
    "receiving": ("ready", "aborted"),
    # ends
    "done": (),
    "aborted": (),
    "preempted": (),
}
"""From each state, the states that may follow. `ready` <-> `running` is a step being planned and finishing."""

ENDED: frozenset[State] = frozenset({"done", "aborted", "preempted"})


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt of a request on one rank. `pending = known + expected - scheduled`; there is no prefill or decode phase.

    number        the engine's name for it
    computed      positions whose KV is in the rank's arena
    scheduled     positions computed or in a step in flight
    num_known     token ids known: prompt and received output
    in_flight     steps in flight that compute it; `sampling` of them will yield a token not known yet
    max_outputs   output tokens this rank may make (1 on a prefill rank)
    boundary_slot window slot that takes the resume state at the last full block boundary, -1 if the model has none
    boundary      blocks before the position that the state in `boundary_slot` belongs to (once its step has ended), or -1
    end_slot      window slot that takes the resume state at the end of the prompt, for the decode rank
    window_states (blocks, window slot) of resume states to leave in the prefix cache when the sequence gives its blocks back
    holds         engine steps and transfers that still touch its blocks; they are released only at 0
    """

    number: int
    request: Request
    placement: Placement
    state: State
    max_outputs: int
    tokens: array[int]
    chain: Chain
    lease: Lease | None = None
    computed: int = 0
    scheduled: int = 0
    in_flight: int = 0
    sampling: int = 0
    holds: int = 0
    outputs: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sent_blocks: int = 0
    restore: int = -1
    boundary_slot: int = -1
    boundary: int = -1
    end_slot: int = -1
    window_states: list[tuple[int, int]] = field(default_factory=list)
    finish: str | None = None
    evict_me: bool = False

    @property
    def key(self) -> Attempt:
        return self.request.key

    @property
    def num_known(self) -> int:
        return self.request.num_tokens + len(self.outputs)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def block_table(self) -> list[int]:
        if self.lease is None:
            raise InvariantError(f"sequence {self.key} holds no blocks in state {self.state}")
        return self.lease.blocks

    def move(self, state: State) -> None:
        """Change state along TRANSITIONS; anything else is a bug."""
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"request {self.request.id} attempt {self.request.attempt}: {self.state} -> {state}")
        self.state = state

    def token_bytes(self, start: int, num_tokens: int) -> bytes:
        """Ids of positions [start, start + num_tokens), all known; empty if the request came without tokens."""
        return self.tokens[start : start + num_tokens].tobytes()

    def extend_chain_to(self, num_blocks: int, block_tokens: int) -> Chain:
        """The chain of the first `num_blocks` blocks, hashing those that generated tokens have filled."""
        if count(self.chain) < num_blocks and self.request.root and self.tokens:
            known = memoryview(self.tokens).cast("B")[: num_blocks * block_tokens * TOKEN_BYTES]
            self.chain = extend_chain(self.chain, self.request.root, known, block_tokens)
        return self.chain


def new_sequence(number: int, request: Request, placement: Placement, state: State, max_outputs: int) -> Sequence:
    """A sequence as it enters a rank; its tokens are copied once from the request's buffer."""
    tokens = array("i")
    tokens.frombytes(request.tokens)
    return Sequence(number, request, placement, state, max_outputs, tokens, request.chain)
