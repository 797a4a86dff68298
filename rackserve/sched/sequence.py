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
    computed      positions computed here or found in a cache
    scheduled     positions computed or in a step in flight
    replay_end    positions before it have their KV in shared blocks: what is computed of them brings back the resume state
    num_known     token ids known: prompt and received output
    in_flight     steps in flight that compute it; `sampling` of them will yield a token not known yet
    max_outputs   output tokens this rank may make (1 on a prefill rank)
    dp_rank       which of its worker's ranks serves it
    reported      output tokens that the owner has been told of, or has told itself
    boundary_slot window slot that takes the resume state at the last full block boundary of the prompt, -1 if none is stored
    end_slot      window slot that takes the resume state at the end of the prompt, for the decode rank; -1 if there is none
    branches      blocks -> window slot: boundaries on the way at which a state is stored too, as others part from there
    boundary      blocks before the last state that generating left in `state_slot(boundary)`, or -1
    branched      such boundaries at which a state was left
    stored        (blocks, window slot) of resume states that finished steps have left, for the prefix cache
    asks          its request wants more of sampling than an item says by itself; see `rackserve.sched.sampling`
    context_due   the engine needs the tokens before the first one that it draws
    holds         engine steps and transfers that still touch its blocks; they are released only at 0
    """

    number: int
    request: Request
    placement: Placement
    state: State
    max_outputs: int
    tokens: array[int]
    chain: Chain
    dp_rank: int = 0
    key: Attempt = field(init=False)
    lease: Lease | None = None
    computed: int = 0
    scheduled: int = 0
    replay_end: int = 0
    in_flight: int = 0
    sampling: int = 0
    holds: int = 0
    outputs: list[int] = field(default_factory=list)
    reported: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    asks: bool = False
    context_due: bool = False
    sent_blocks: int = 0
    restore: int = -1
    boundary_slot: int = -1
    end_slot: int = -1
    branches: dict[int, int] = field(default_factory=dict)
    branched: list[int] = field(default_factory=list)
    boundary: int = -1
    stored: list[tuple[int, int]] = field(default_factory=list)
    finish: str | None = None
    evict_me: bool = False

    def __post_init__(self) -> None:
        self.key = self.request.key

    @property
    def num_known(self) -> int:
        return self.request.num_tokens + len(self.outputs)

    @property
    def num_present(self) -> int:
        """Positions whose KV is in the sequence's blocks."""
        return max(self.computed, self.replay_end)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def block_table(self) -> list[int]:
        if self.lease is None:
            raise InvariantError(f"sequence {self.key} holds no blocks in state {self.state}")
        return self.lease.blocks

    def state_slot(self, num_blocks: int) -> int:
        """The window slot for the state at a boundary within the output, -1 if none is stored.

        Two slots take turns: whether a step reaches the next boundary, by its drafts or before a stop token, shows only when
        it has ended, and until then the state before must not be written over.
        """
        return -1 if self.boundary_slot < 0 else (self.boundary_slot, self.end_slot)[num_blocks % 2]

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


def new_sequence(
    number: int, request: Request, placement: Placement, state: State, max_outputs: int, dp_rank: int = 0
) -> Sequence:
    """A sequence as it enters a rank; its tokens are copied once from the request's buffer."""
    tokens = array("i")
    tokens.frombytes(request.tokens)
    sequence = Sequence(number, request, placement, state, max_outputs, tokens, request.chain, dp_rank)
    if request.tokens:
        sequence.asks = request.sampling.changes_logits or request.scores_prompt
        sequence.context_due = request.sampling.reads_output
    return sequence
