"""A session as parallel conversations: the root and its subagents, with who starts and who waits for whom."""

from __future__ import annotations

import msgspec

from rackserve.base.units import Time
from rackserve.bench.session import Session, Subagent, TraceRequest

JOIN_SLACK_NS: Time = 1_000
"""Recorded times are rounded, and scaled ones once more: a turn this much before a subagent's end still waits for it."""


class Stream(msgspec.Struct, frozen=True):
    """One conversation of a session. Stream 0 is the root.

    turns        its requests
    starts_ns    when each was sent in the recording, from the start of the session
    gaps_ns      pause before turn k, counted from the end of turn k - 1; before turn 0 from the end of the parent's turn
                 `spawn_turn` (from the start of the session when that is -1)
    parent       stream that spawned it; -1 for the root
    join_turn    the parent's turn that waits until this stream has ended; -1 when it runs in the background
    """

    turns: tuple[TraceRequest, ...]
    starts_ns: tuple[Time, ...]
    gaps_ns: tuple[Time, ...]
    parent: int = -1
    spawn_turn: int = -1
    join_turn: int = -1


def streams_of(session: Session) -> tuple[Stream, ...]:
    """The session's streams, parents before children.

    A later parent turn waits for a subagent whose recorded end does not lie after that turn's recorded start. The pause of a
    turn is never negative: recorded overlaps become a pause of 0.
    """
    made: list[Stream] = []
    _add(session.entries, 0, -1, -1, 0, -1, made)
    return tuple(made)


def _add(
    entries: tuple[TraceRequest | Subagent, ...],
    origin_ns: Time,
    parent: int,
    spawn_turn: int,
    spawned_ns: Time,
    join_turn: int,
    made: list[Stream],
) -> None:
    turns = tuple(entry for entry in entries if isinstance(entry, TraceRequest))
    starts = tuple(origin_ns + turn.at_ns for turn in turns)
    ends = tuple(origin_ns + turn.end_ns for turn in turns)
    gaps = tuple(max(0, start - previous) for start, previous in zip(starts, (spawned_ns, *ends), strict=False))
    number = len(made)
    if turns:
        made.append(Stream(turns, starts, gaps, parent, spawn_turn, join_turn))
    else:  # only subagents: they hang on whatever spawned this conversation
        number, starts, ends = parent, (), ()
    seen = 0
    for entry in entries:
        if isinstance(entry, TraceRequest):
            seen += 1
            continue
        after = seen - 1 if turns else spawn_turn
        since = ends[after] if turns and after >= 0 else spawned_ns
        end_ns = origin_ns + entry.end_ns
        join = next((turn for turn in range(seen, len(starts)) if starts[turn] + JOIN_SLACK_NS >= end_ns), -1)
        _add(entry.entries, origin_ns + entry.at_ns, number, after, since, join, made)
