"""Finds the agents that a recording flattened into one list of requests, by the prefixes their prompts share.

Rules
- A request continues the conversation whose last prompt is a whole prefix of its own, which had been answered by then and asked
  the same model; the longest such prompt wins. Any other request begins a new conversation, which forks off the last prompt
  it shares most blocks with.
- If nothing ever continued the longer prompt, the fork that shares most with it was no other agent but the same one after
  its context was edited, and is joined to it: unless it comes after more than an hour with less than half of the blocks.
- A first request that shares nothing with any other (a title, a greeting) stays with the main conversation.
- The conversation of the first request is the main one. The others run beside it as subagents, from their first sending to
  their last answer; their names tell the kind: `aux` (a call on the side), `wide` (three or more forked from one prompt that
  ran at the same time), `fan` (any other).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackserve.base.units import NS_PER_S, Time
from rackserve.bench.session import HASH_ID_BYTES, Session, Subagent, TraceRequest, shared_ids

SEAM_GAP_NS: Time = 3_600 * NS_PER_S
SEAM_SHARE = 0.5
AUX_INPUT_TOKENS = 16_384
AUX_INPUT_SHARE = 0.1
DIGEST_OUTPUT_TOKENS = 4_000
DIGEST_RATIO = 20
WIDE_GROUP = 3


class _Conversation:
    """Requests of one agent in order of time, and the prompt it forked from: which request, of which conversation, how deep."""

    __slots__ = ("depth", "fork", "requests")

    def __init__(self, first: TraceRequest, fork: TraceRequest | None, depth: int) -> None:
        self.requests = [first]
        self.fork = fork
        self.depth = depth

    @property
    def tail(self) -> TraceRequest:
        """The last request with ids: one without tells nothing."""
        return next((request for request in reversed(self.requests) if request.hash_ids), self.requests[-1])

    @property
    def end_ns(self) -> Time:
        return max(request.end_ns for request in self.requests)

    def is_continued_by(self, request: TraceRequest) -> bool:
        tail = self.tail
        return (
            tail.model == request.model and tail.end_ns <= request.at_ns + 1_000 and request.hash_ids.startswith(tail.hash_ids)
        )


def separate_agents(session: Session) -> Session:
    """The session with every flattened agent as a subagent of its own, inside recorded subagents too."""
    return msgspec.structs.replace(session, entries=_separate(session.entries))


def _separate(entries: tuple[TraceRequest | Subagent, ...]) -> tuple[TraceRequest | Subagent, ...]:
    kept: list[TraceRequest | Subagent] = [
        Subagent(entry.id, entry.at_ns, entry.end_ns, _separate(entry.entries))
        for entry in entries
        if isinstance(entry, Subagent)
    ]
    requests = sorted((entry for entry in entries if isinstance(entry, TraceRequest)), key=lambda request: request.at_ns)
    if not requests:
        return tuple(kept)
    title = [requests.pop(0)] if _is_title(requests) else []
    made = _conversations(requests)
    for name, other in zip(_names(made), made[1:], strict=True):
        first_ns = other.requests[0].at_ns
        inner = tuple(msgspec.structs.replace(request, at_ns=request.at_ns - first_ns) for request in other.requests)
        kept.append(Subagent(name, first_ns, other.end_ns, inner))
    kept += [*title, *made[0].requests]
    kept.sort(key=lambda entry: entry.at_ns)
    return tuple(kept)


def _is_title(requests: Sequence[TraceRequest]) -> bool:
    """The first of several requests shares no block with any other: ids are chained, so their first blocks tell."""
    first = [request.hash_ids[:HASH_ID_BYTES] for request in requests]
    return len(first) > 1 and first[0] != b"" and first[0] not in first[1:]


def _conversations(requests: Sequence[TraceRequest]) -> list[_Conversation]:
    """Conversations by their first request; the first one is the main one."""
    made: list[_Conversation] = []
    for request in requests:
        if not request.hash_ids and made:
            made[0].requests.append(request)  # nothing tells whose it is
            continue
        following = [conversation for conversation in made if conversation.is_continued_by(request)]
        if following:
            max(following, key=lambda conversation: len(conversation.tail.hash_ids)).requests.append(request)
            continue
        near = [
            (shared_ids(other.tail.hash_ids, request.hash_ids), len(other.tail.hash_ids), -n) for n, other in enumerate(made)
        ]
        depth, _, number = max(near, default=(0, 0, 0))
        made.append(_Conversation(request, made[-number].tail if depth else None, depth))
    return _joined(made)


def _joined(made: list[_Conversation]) -> list[_Conversation]:
    """`made` with every conversation that is the continuation of another joined to it."""
    left = list(made)
    changed = True
    while changed:
        changed = False
        for owner in left:
            tail = owner.tail
            forks = [other for other in left if other.fork is tail and other is not owner and _may_follow(tail, other)]
            if not forks:
                continue
            chosen = max(forks, key=lambda other: other.depth)
            left.remove(chosen)
            owner.requests.extend(chosen.requests)
            for other in left:  # what forked off the edited prompt may follow the new last one instead
                depth = shared_ids(owner.tail.hash_ids, other.requests[0].hash_ids)
                if other.fork is tail and depth:
                    other.fork, other.depth = owner.tail, depth
            changed = True
            break
    return left


def _may_follow(tail: TraceRequest, other: _Conversation) -> bool:
    first = other.requests[0]
    if first.model != tail.model or first.at_ns + 1_000 < tail.end_ns:
        return False
    return first.at_ns - tail.end_ns <= SEAM_GAP_NS or other.depth >= SEAM_SHARE * tail.num_blocks


def _names(made: Sequence[_Conversation]) -> list[str]:
    """Names of all conversations but the main one, which is the first."""
    others = made[1:]
    largest = max(request.input_tokens for request in made[0].requests)
    model = made[0].requests[0].model
    names: list[str] = []
    for number, other in enumerate(others):
        first = other.requests[0]
        small = first.input_tokens < max(AUX_INPUT_TOKENS, AUX_INPUT_SHARE * largest)
        digest = first.output_tokens < DIGEST_OUTPUT_TOKENS and first.input_tokens > DIGEST_RATIO * first.output_tokens
        beside = [each for each in others if each.fork is other.fork and other.fork is not None and _overlap(each, other)]
        if len(other.requests) == 1 and (first.model != model or small or digest):
            names.append(f"aux{number}")
        else:
            names.append(f"{'wide' if len(beside) >= WIDE_GROUP else 'fan'}{number}")
    return names


def _overlap(left: _Conversation, right: _Conversation) -> bool:
    return left is right or (left.requests[0].at_ns < right.end_ns and right.requests[0].at_ns < left.end_ns)
