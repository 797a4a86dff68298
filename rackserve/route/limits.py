"""Admission: each rank's queue is bounded in requests and in tokens of work, so a refusal comes at once, not minutes late."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackserve.route.cost import Candidate
from rackserve.route.placement import RouterConfig


class Refusal(msgspec.Struct, frozen=True):
    """Why an attempt is not placed: a machine-readable code and a text for people. The same request may succeed later."""

    code: str
    detail: str


def admissible(config: RouterConfig, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates whose queue has room for the attempt.

    An idle rank takes a prompt of any length: otherwise one longer than the limit could never be served.
    """
    requests = config.max_queued_requests_per_rank
    tokens = config.max_queued_tokens_per_rank
    return [
        c
        for c in candidates
        if (not requests or c.num_queued < requests) and (not tokens or not c.num_queued or c.cost <= tokens)
    ]


def is_full(config: RouterConfig, booked: Sequence[tuple[int, int]]) -> bool:
    """Whether no rank would take an attempt, however small; `booked`: tokens and attempts on each. False without any rank."""
    requests = config.max_queued_requests_per_rank
    tokens = config.max_queued_tokens_per_rank
    taken = [bool((requests and number >= requests) or (tokens and number and work >= tokens)) for work, number in booked]
    return bool(taken) and all(taken)


def no_room(config: RouterConfig, candidates: Sequence[Candidate], kind: str = "prefill rank") -> Refusal:
    """Why none of `candidates` is admissible. `kind`: what one of them is to people."""
    if not candidates:
        return Refusal("unavailable", f"no {kind} is up")
    return Refusal(
        "overloaded",
        f"the queues of all {len(candidates)} {kind}s are full (router.max_queued_requests_per_rank = "
        f"{config.max_queued_requests_per_rank}, router.max_queued_tokens_per_rank = {config.max_queued_tokens_per_rank})",
    )
