"""Everything nodes say to each other. Commands are imperative, events past tense; all are values.

Sender and receiver of each message are in its docstring as `sender -> receiver`. Messages about a request carry the attempt;
a receiver drops those of an attempt it does not know or no longer runs.
"""

from __future__ import annotations

import msgspec

from rackserve.base.ids import Attempt, NodeId, Rank
from rackserve.base.keys import Chain
from rackserve.base.request import Placement, Request, Usage
from rackserve.base.step import StepResult, TokenLogprobs
from rackserve.base.transfer import Region
from rackserve.base.units import Time


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Root of all messages; encoded as an array whose first element is the class name."""


class AttemptMessage(Message, frozen=True):
    """A message about one attempt of a request."""

    request: str
    attempt: int

    @property
    def key(self) -> Attempt:
        return (self.request, self.attempt)


# ---------------------------------------------------------------- client <-> frontend


class Submit(Message, frozen=True):
    """client -> frontend: serve this request; its `Output` messages go to `reply_to`."""

    request: Request
    reply_to: NodeId


class Cancel(Message, frozen=True):
    """client -> frontend: no more output of this request is wanted.

    `reason` "cancelled": nobody reads it any more. "stop": the client found a stop string; the request is finished.
    """

    request: str
    reason: str = "cancelled"


class Output(Message, frozen=True):
    """frontend -> client: output tokens number `index`, `index + 1`, ...; the last one carries `finish` or `error`.

    `finish` is "stop" (a stop token), "length" or "cancelled"; `error` is a code such as "overloaded" or "unavailable" with
    `detail` for people. `usage` is set on the last one only. `attempts` counts how often the request was placed.
    `prompt_logprobs`, if wanted: of the prompt's tokens from the second on, with output token 0.
    """

    request: str
    index: int
    tokens: tuple[int, ...]
    finish: str | None = None
    error: str | None = None
    detail: str = ""
    usage: Usage | None = None
    attempts: int = 1
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


# ---------------------------------------------------------------- frontend <-> router


class Place(Message, frozen=True):
    """frontend -> router: find ranks for this attempt and start it."""

    request: Request


class Placed(Message, frozen=True):
    """router -> frontend: the attempt is booked and under way."""

    placement: Placement


class Refused(AttemptMessage, frozen=True):
    """router -> frontend: the attempt cannot be placed. `retry` tells whether the same request may succeed later."""

    code: str
    detail: str
    retry: bool


class AttemptLost(AttemptMessage, frozen=True):
    """router -> frontend: the attempt ended without finishing (rank down, deadline, preempted); place it again."""

    reason: str


class AbortAttempt(AttemptMessage, frozen=True):
    """frontend -> router -> ranks, prefill -> decode: stop work on this attempt and give back what it holds."""

    reason: str


# ---------------------------------------------------------------- router <-> ranks


class Prefill(Message, frozen=True):
    """router -> prefill: compute the prompt and hand it over to `placement.decode`."""

    placement: Placement
    request: Request


class PrefillStarted(AttemptMessage, frozen=True):
    """prefill -> router: not as many tokens need not be computed as the placement says, so the booking is to be put right."""

    rank: Rank
    cached_tokens: int


class PrefillProgressed(AttemptMessage, frozen=True):
    """prefill -> router: `computed_tokens` more prompt tokens are done, but not all."""

    rank: Rank
    computed_tokens: int


class PrefillFinished(AttemptMessage, frozen=True):
    """prefill -> router: this rank has no more compute to do for the attempt."""

    rank: Rank


class AttemptFinished(AttemptMessage, frozen=True):
    """prefill or decode -> router: the attempt made its last token on this rank."""

    rank: Rank


PREEMPTED = "preempted"
"""Reason of an attempt that gave its blocks to an older one: no failure, it is placed again as often as it takes."""


class AttemptFailed(AttemptMessage, frozen=True):
    """prefill or decode -> router: this rank gave the attempt up and holds nothing for it."""

    rank: Rank
    reason: str
    retry: bool = True


class TokensEmitted(AttemptMessage, frozen=True):
    """prefill or decode -> frontend: output tokens number `index`... of the request (counted over all attempts).

    `cached_tokens`: prompt tokens of this attempt that were not computed. `finish` as in `Output`, or one of
    `rackserve.base.step.FAILURES`; `prompt_logprobs` as there.
    """

    rank: Rank
    index: int
    tokens: tuple[int, ...]
    cached_tokens: int
    finish: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


# ---------------------------------------------------------------- prefill <-> decode


class Reserve(Message, frozen=True):
    """prefill -> decode: make room for this attempt's KV."""

    placement: Placement
    request: Request


class Reserved(AttemptMessage, frozen=True):
    """decode -> prefill: logical block `first_block + i` of the prompt goes to `slots[i]` of `region`, the decode rank's arena.

    Blocks before `first_block` are in the decode rank's own cache. `window_slot` takes the resume state, or is -1.
    """

    rank: Rank
    region: Region
    first_block: int
    slots: tuple[int, ...]
    window_slot: int = -1


class HandOver(AttemptMessage, frozen=True):
    """prefill -> decode: all KV of the prompt is in place; go on after the first output token(s)."""

    first_tokens: tuple[int, ...]
    cached_tokens: int


class PushesEnded(AttemptMessage, frozen=True):
    """prefill -> decode: no transfer of this attempt will write to the decode rank any more (after an abort)."""


# ---------------------------------------------------------------- ranks <-> pool


class PoolLookup(AttemptMessage, frozen=True):
    """prefill -> pool: how much of `chain` do you hold beyond its first `from_block` blocks? Lease what you answer."""

    rank: Rank
    chain: Chain
    from_block: int


class PoolFound(AttemptMessage, frozen=True):
    """pool -> prefill: blocks [from_block, from_block + len(slots)) are leased under `lease` (0: nothing found).

    A slot is (segment, index). `window_slot` is the resume state at the last of them, or None.
    """

    lease: int
    from_block: int
    slots: tuple[tuple[int, int], ...]
    window_slot: tuple[int, int] | None = None


class PoolRelease(Message, frozen=True):
    """rank -> pool: the transfers that needed `lease` have ended."""

    lease: int


class PoolStore(AttemptMessage, frozen=True):
    """rank -> pool: I have blocks [from_block, count(chain)) of `chain`; where shall I put those you lack?"""

    rank: Rank
    chain: Chain
    from_block: int
    with_window: bool = False
    tenant: str = ""


class PoolGranted(AttemptMessage, frozen=True):
    """pool -> rank: write blocks [from_block, from_block + len(slots)) to `slots`, then commit `grant` (0: nothing to do)."""

    grant: int
    from_block: int
    slots: tuple[tuple[int, int], ...]
    window_slot: tuple[int, int] | None = None


class PoolCommit(Message, frozen=True):
    """rank -> pool: the blocks of `grant` are written. Only now may others see them."""

    grant: int


class PoolCancel(Message, frozen=True):
    """rank -> pool: the blocks of `grant` are not written and no transfer to them is under way."""

    grant: int


# ---------------------------------------------------------------- presence: ranks and pool -> router


class BlocksStored(Message, frozen=True):
    """holder -> router: `holder` now has all blocks of `chain`; those from `start` on are new. `number` counts up by one."""

    holder: Rank
    number: int
    chain: Chain
    start: int


class BlocksRemoved(Message, frozen=True):
    """holder -> router: of the blocks along `chain`, `holder` keeps only the first `keep` (and none beyond `chain`)."""

    holder: Rank
    number: int
    chain: Chain
    keep: int


class PresenceSnapshot(Message, frozen=True):
    """holder -> router: everything `holder` has after event `number`, as maximal chains. Replaces what was known."""

    holder: Rank
    number: int
    chains: tuple[Chain, ...]


class SnapshotWanted(Message, frozen=True):
    """router -> holder: events were lost; send a `PresenceSnapshot`."""

    holder: Rank


# ---------------------------------------------------------------- supervision: host -> everyone


class RankUp(Message, frozen=True):
    """host -> router, pool, ranks: `rank` started (again) with empty caches as `incarnation`."""

    rank: Rank
    role: str
    incarnation: int


class RankDown(Message, frozen=True):
    """host -> router, pool, ranks: `rank` is gone; it writes nowhere any more."""

    rank: Rank
    incarnation: int


class SegmentLost(Message, frozen=True):
    """host -> pool: the tray that holds pool segment `segment` is gone, and its content with it."""

    segment: int


class SegmentJoined(Message, frozen=True):
    """host -> pool: pool segment `segment` (empty) can be used."""

    segment: int
    num_slots: int
    num_window_slots: int = 0
    rank: Rank | None = None


class Drain(Message, frozen=True):
    """host -> frontend: take no new requests; `Drained` is sent to `reply_to` when the running ones have ended."""

    reply_to: NodeId


class Drained(Message, frozen=True):
    """frontend -> host: nothing is running any more."""


# ---------------------------------------------------------------- ports -> their node


class StepFinished(Message, frozen=True):
    """engine -> its node: the group's step `number` is done."""

    number: int
    results: tuple[StepResult, ...]
    duration_ns: Time


class EngineFailed(Message, frozen=True):
    """engine -> its node: step `number` raised; the engine's state for its sequences is lost."""

    number: int
    reason: str


class TransferFinished(Message, frozen=True):
    """store -> its node: transfer `number` is complete."""

    number: int


class TransferFailed(Message, frozen=True):
    """store -> its node: transfer `number` stopped; its target slots hold nothing usable and will not be written any more."""

    number: int
    reason: str


class Timeout(Message, frozen=True):
    """clock -> the node that asked for it: the moment named `kind` for `key` has come (it may be stale: check)."""

    kind: str
    key: str
    attempt: int = 0


AnyMessage = (
    Submit | Cancel | Output | Place | Placed | Refused | AttemptLost | AbortAttempt | Prefill | PrefillStarted
    | PrefillProgressed | PrefillFinished | AttemptFinished | AttemptFailed | TokensEmitted | Reserve | Reserved | HandOver
    | PushesEnded | PoolLookup | PoolFound | PoolRelease | PoolStore | PoolGranted | PoolCommit | PoolCancel | BlocksStored
    | BlocksRemoved | PresenceSnapshot | SnapshotWanted | RankUp | RankDown | SegmentLost | SegmentJoined | Drain | Drained
    | StepFinished | EngineFailed | TransferFinished | TransferFailed | Timeout
)  # fmt: skip
"""The closed set of messages, for typed decoding at process borders."""
