"""What nodes record about their work: the raw material of metrics, logs, calibration and golden traces.

Events are past tense and carry plain numbers; the recorder adds the time and the recording node.
"""

from __future__ import annotations

import msgspec

from rackserve.base.ids import Rank
from rackserve.base.units import Time


class Event(msgspec.Struct, frozen=True, tag=True):
    """Root of all recorded events."""


class RequestArrived(Event, frozen=True):
    """The frontend was handed a request."""

    request: str
    session: str
    prompt_tokens: int
    max_tokens: int


class RequestPlaced(Event, frozen=True):
    """`costs`: the policy's own figure for each candidate prefill rank, in tokens of uncached work."""

    request: str
    attempt: int
    prefill: Rank
    decode: Rank
    predicted_cached_tokens: int
    pool_tokens: int
    queued_tokens: int
    costs: tuple[tuple[Rank, int], ...] = ()


class PrefillAdmitted(Event, frozen=True):
    """Cached tokens of the attempt by where they came from: the rank's own cache or the pool."""

    request: str
    attempt: int
    rank: Rank
    prompt_tokens: int
    local_tokens: int
    fetched_tokens: int
    waited_ns: Time


class FirstTokenSent(Event, frozen=True):
    """The client was sent its first output token, `ttft_ns` after the request arrived."""

    request: str
    attempt: int
    ttft_ns: Time


class RequestEnded(Event, frozen=True):
    """How a request ended: `outcome` is finished, aborted or refused; `reason` says why."""

    request: str
    outcome: str
    reason: str
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ns: Time
    total_ns: Time


class StepDone(Event, frozen=True):
    """One rank's part of a finished step; the raw material of calibration.

    new_tokens       positions computed
    context_tokens   sum over items of the positions before the item (attention reads them)
    attended         sum over all computed positions of the positions each attends to
    num_sequences    sequences in the step; `num_sampled` of them drew output
    duration_ns      engine time of the whole group step (it ends with the slowest rank)
    num_passes       forward passes the step stands for. All counts but this and the duration are those of the first
    """

    rank: Rank
    number: int
    new_tokens: int
    context_tokens: int
    attended: int
    num_sequences: int
    num_sampled: int
    duration_ns: Time
    dummy: bool = False
    num_passes: int = 1


class DraftsVerified(Event, frozen=True):
    """What became of the drafts of one rank's step.

    num_sequences        items that might have had drafts verified; each also yields one token that no draft gave
    verified, accepted   by draft position, first to last: items in which the draft there was verified, and was accepted
    """

    rank: Rank
    num_sequences: int
    verified: tuple[int, ...]
    accepted: tuple[int, ...]


class QueueChanged(Event, frozen=True):
    """Requests of a rank that wait for their first step, and those that have had one, after a change."""

    rank: Rank
    queued: int
    running: int


class TransferDone(Event, frozen=True):
    """A transfer ended: `outcome` is finished, or failed if it was cancelled or could not be done.

    request, attempt  whose blocks it moved
    """

    kind: str
    rank: Rank
    num_slots: int
    num_bytes: int
    duration_ns: Time
    outcome: str = "finished"
    request: str = ""
    attempt: int = 0


class BlocksEvicted(Event, frozen=True):
    """A holder gave up cached blocks for others."""

    holder: Rank
    num_blocks: int


class Preempted(Event, frozen=True):
    """An attempt gave its blocks to an older one."""

    request: str
    attempt: int
    rank: Rank


class AttemptRetried(Event, frozen=True):
    """An attempt was given up for `reason`; the request is placed again, unless that was its last try."""

    request: str
    attempt: int
    reason: str


class MessageDropped(Event, frozen=True):
    """A message that came too late, twice, or for an unknown attempt was ignored (or lost by the transport)."""

    node: str
    message: str
    reason: str


class RankChanged(Event, frozen=True):
    """The supervisor sees a rank in another `state`: starting, up, down, failed (it stays down) or stopped."""

    rank: Rank
    state: str
    incarnation: int


AnyEvent = (
    RequestArrived | RequestPlaced | PrefillAdmitted | FirstTokenSent | RequestEnded | StepDone | QueueChanged
    | DraftsVerified | TransferDone | BlocksEvicted | Preempted | AttemptRetried | MessageDropped | RankChanged
)  # fmt: skip
"""The closed set of events, for typed decoding of recordings."""
