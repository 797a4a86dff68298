"""Recorded agent sessions in the "Weka" format: one JSON document a session, as recorded or in a compact form of it.

In the compact form a request has no `hash_ids` but `lcp` (how many leading ids it shares with the request before it in file
order, subagents' requests included) and `tail` (the other ids as [first id, length] runs).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rackserve.base.units import to_ns
from rackserve.bench.id_chain import IdChain
from rackserve.bench.session import MAX_TIME_S, MAX_TOKENS, Session, Subagent, TraceRequest


class _Entry(msgspec.Struct):
    t: float
    type: Literal["n", "s", "subagent"]
    input_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    model: str = ""
    hash_ids: list[int] | None = None
    lcp: int | None = None
    tail: list[tuple[int, int]] = []
    nblk: int | None = None
    api_time: float | None = None
    think_time: float | None = None
    agent_id: str | None = None
    duration_ms: float | None = None
    requests: list[_Entry] | None = None


class _Document(msgspec.Struct):
    id: str
    requests: list[_Entry]
    block_size: int = 64
    hash_id_scope: str = "local"


_decoder = msgspec.json.Decoder(_Document)


def parse_weka(raw: bytes) -> Session:
    """One session from the bytes of one JSON document. Raises ValueError (or msgspec's) with what is wrong."""
    document = _decoder.decode(raw)
    if document.block_size < 1:
        raise ValueError(f"`block_size` must be at least 1, got {document.block_size}")
    if document.hash_id_scope != "local":
        raise ValueError(f"`hash_id_scope` must be 'local', got {document.hash_id_scope!r}: shared ids are not supported")
    entries = _convert(document.requests, IdChain(document.block_size), "requests")
    return Session(document.id, document.block_size, entries)


def _check_numbers(entry: _Entry, here: str) -> None:
    """Raise ValueError for a time that cannot be one. Answer and think times may be slightly negative: clocks differ."""
    if entry.t < 0:
        raise ValueError(f"{here}: `t` is negative; count seconds from the start of the session")
    millis = None if entry.duration_ms is None else entry.duration_ms / 1000
    times = {"t": entry.t, "api_time": entry.api_time, "think_time": entry.think_time, "duration_ms": millis}
    for name, seconds in times.items():
        if seconds is not None and not abs(seconds) <= MAX_TIME_S:
            raise ValueError(f"{here}: `{name}` must be a number of at most {MAX_TIME_S:g} seconds, got {seconds}")


def _convert(entries: list[_Entry], ids: IdChain, where: str) -> tuple[TraceRequest | Subagent, ...]:
    made: list[TraceRequest | Subagent] = []
    for number, entry in enumerate(entries):
        here = f"{where}[{number}]"
        _check_numbers(entry, here)
        at_ns = to_ns(entry.t)
        if entry.type == "subagent":
            if entry.requests is None:
                raise ValueError(f"{here}: a subagent needs `requests`")
            inner = _convert(entry.requests, ids, f"{here}.requests")
            ends = [part.end_ns for part in inner]
            end_ns = at_ns + (round((entry.duration_ms or 0.0) * 1e6) or max(ends, default=0))
            made.append(Subagent(entry.agent_id or here, at_ns, end_ns, inner))
            continue
        if not 1 <= entry.input_tokens <= MAX_TOKENS or not 0 <= entry.output_tokens <= MAX_TOKENS:
            raise ValueError(f"{here}: `in` must be at least 1 and `out` at least 0, both at most {MAX_TOKENS}")
        try:
            hash_ids = _hash_ids(entry, ids)
        except ValueError as error:
            raise ValueError(f"{here}: {error}") from None
        api_ns = to_ns(_api_time(entries, number))
        made.append(TraceRequest(at_ns, api_ns, entry.input_tokens, entry.output_tokens, hash_ids, entry.model))
    return tuple(made)


def _hash_ids(entry: _Entry, ids: IdChain) -> bytes:
    if entry.hash_ids is not None:
        return ids.listed(entry.hash_ids, entry.input_tokens)
    if entry.lcp is None:
        raise ValueError("a request needs `hash_ids`, or `lcp` and `tail`")
    if not 0 <= entry.lcp <= ids.num_previous:
        raise ValueError(f"`lcp` = {entry.lcp} is longer than the {ids.num_previous} ids before it")
    count = entry.lcp + sum(max(0, length) for _, length in entry.tail)
    if entry.nblk is not None and entry.nblk != count:
        raise ValueError(f"`nblk` = {entry.nblk} but `lcp` and `tail` give {count} ids; the line is damaged")
    return ids.packed(entry.lcp, entry.tail, entry.input_tokens)


def _api_time(entries: list[_Entry], number: int) -> float:
    """Seconds the answer took; where it was not recorded, what the next turn's `think_time` leaves of the time between."""
    entry = entries[number]
    if entry.api_time is not None:
        return max(0.0, entry.api_time)
    following = next((e for e in entries[number + 1 :] if e.type != "subagent"), None)
    if following is None or following.think_time is None:
        return 0.0
    return max(0.0, following.t - entry.t - following.think_time)
