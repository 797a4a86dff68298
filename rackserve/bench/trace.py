"""Recorded agent sessions ("Weka" format): native JSON or JSONL, plain or gzip, and a compact form of it.

In the compact form a request has no `hash_ids` but `lcp` (how many leading ids it shares with the request before it in file
order, subagents' requests included) and `tail` (the other ids as [first id, length] runs).

Ids are chained: an id names its block and all blocks before it, within its session only. That is checked on reading.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.base.units import Time, to_ns

HASH_ID_BYTES = 4

MAX_TIME_S = 1e9
MAX_TOKENS = 10**9


class TraceRequest(msgspec.Struct, frozen=True):
    """One recorded call.

    at_ns         when it was sent, counted from the start of its session (or of its subagent)
    api_ns        how long the recorded answer took
    input_tokens, output_tokens   as recorded (or scaled)
    hash_ids      ids of the full prompt blocks, int32 little-endian
    """

    at_ns: Time
    api_ns: Time
    input_tokens: int
    output_tokens: int
    hash_ids: bytes

    @property
    def num_blocks(self) -> int:
        return len(self.hash_ids) // HASH_ID_BYTES

    @property
    def end_ns(self) -> Time:
        """When the recorded answer ended, on the clock of `at_ns`."""
        return self.at_ns + self.api_ns


class Subagent(msgspec.Struct, frozen=True):
    """A conversation with a fresh context that a session started at `at_ns` and that ended at `end_ns` (session clock)."""

    id: str
    at_ns: Time
    end_ns: Time
    entries: tuple[TraceRequest | Subagent, ...]


class Session(msgspec.Struct, frozen=True):
    """One recorded session. `block_tokens` is the number of tokens behind each hash id (64 unless scaled)."""

    id: str
    block_tokens: int
    entries: tuple[TraceRequest | Subagent, ...]

    @property
    def num_requests(self) -> int:
        return sum(1 for _ in requests_of(self.entries))


def requests_of(entries: tuple[TraceRequest | Subagent, ...]) -> Iterator[TraceRequest]:
    """All requests in file order, those of subagents included."""
    for entry in entries:
        if isinstance(entry, Subagent):
            yield from requests_of(entry.entries)
        else:
            yield entry


def shared_ids(a: bytes, b: bytes) -> int:
    """How many leading ids two `hash_ids` share."""
    low, high = 0, min(len(a), len(b)) // HASH_ID_BYTES
    while low < high:  # the first `low` agree
        probe = (low + high + 1) // 2
        if a[: probe * HASH_ID_BYTES] == b[: probe * HASH_ID_BYTES]:
            low = probe
        else:
            high = probe - 1
    return low


class _Entry(msgspec.Struct):
    t: float
    type: Literal["n", "s", "subagent"]
    input_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
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


class _Blocks:
    """Turns a session's id lists into checked bytes, comparing each list with the one before it."""

    __slots__ = ("_parent", "_previous", "block_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._previous = b""
        self._parent: dict[int, int] = {}

    def read(self, entry: _Entry) -> bytes:
        """The request's ids of full blocks as bytes; a ValueError says what is wrong."""
        try:
            ids = self._compact(entry) if entry.hash_ids is None else array("i", entry.hash_ids)
        except OverflowError:
            raise ValueError("a hash id does not fit 31 bits; renumber the ids of the session from 0") from None
        spare = entry.input_tokens - len(ids) * self.block_tokens
        if not -self.block_tokens < spare < self.block_tokens:
            raise ValueError(
                f"{len(ids)} hash ids of {self.block_tokens} tokens do not match `in` = {entry.input_tokens}; "
                "give one id per block of the prompt"
            )
        raw = ids.tobytes()
        self._check_chain(ids, raw)
        self._previous = raw
        return raw if spare >= 0 else raw[:-HASH_ID_BYTES]  # the id of a part block names no reusable block

    def _compact(self, entry: _Entry) -> array[int]:
        if entry.lcp is None:
            raise ValueError("a request needs `hash_ids`, or `lcp` and `tail`")
        if not 0 <= entry.lcp <= len(self._previous) // HASH_ID_BYTES:
            raise ValueError(f"`lcp` = {entry.lcp} is longer than the {len(self._previous) // HASH_ID_BYTES} ids before it")
        ids = array("i")
        ids.frombytes(self._previous[: entry.lcp * HASH_ID_BYTES])
        for first, length in entry.tail:
            if length > MAX_TOKENS // self.block_tokens:
                raise ValueError(f"`tail` holds a run of {length} ids; a prompt has at most {MAX_TOKENS} tokens")
            ids.extend(range(first, first + length))
        if entry.nblk is not None and entry.nblk != len(ids):
            raise ValueError(f"`nblk` = {entry.nblk} but `lcp` and `tail` give {len(ids)} ids; the line is damaged")
        return ids

    def _check_chain(self, ids: array[int], raw: bytes) -> None:
        shared = shared_ids(raw, self._previous)
        parent = ids[shared - 1] if shared else -1
        for index in range(shared, len(ids)):
            if self._parent.setdefault(ids[index], parent) != parent:
                raise ValueError(f"hash id {ids[index]} follows two different blocks; ids must name a block and all before it")
            parent = ids[index]


def _check_numbers(entry: _Entry, here: str) -> None:
    """Raise ValueError for a time that cannot be one. Answer and think times may be slightly negative: clocks differ."""
    if entry.t < 0:
        raise ValueError(f"{here}: `t` is negative; count seconds from the start of the session")
    millis = None if entry.duration_ms is None else entry.duration_ms / 1000
    times = {"t": entry.t, "api_time": entry.api_time, "think_time": entry.think_time, "duration_ms": millis}
    for name, seconds in times.items():
        if seconds is not None and not abs(seconds) <= MAX_TIME_S:
            raise ValueError(f"{here}: `{name}` must be a number of at most {MAX_TIME_S:g} seconds, got {seconds}")


def _convert(entries: list[_Entry], blocks: _Blocks, where: str) -> tuple[TraceRequest | Subagent, ...]:
    made: list[TraceRequest | Subagent] = []
    for number, entry in enumerate(entries):
        here = f"{where}[{number}]"
        _check_numbers(entry, here)
        at_ns = to_ns(entry.t)
        if entry.type == "subagent":
            if entry.requests is None:
                raise ValueError(f"{here}: a subagent needs `requests`")
            inner = _convert(entry.requests, blocks, f"{here}.requests")
            ends = [part.end_ns for part in inner]
            end_ns = at_ns + (round((entry.duration_ms or 0.0) * 1e6) or max(ends, default=0))
            made.append(Subagent(entry.agent_id or here, at_ns, end_ns, inner))
            continue
        if not 1 <= entry.input_tokens <= MAX_TOKENS or not 0 <= entry.output_tokens <= MAX_TOKENS:
            raise ValueError(f"{here}: `in` must be at least 1 and `out` at least 0, both at most {MAX_TOKENS}")
        try:
            ids = blocks.read(entry)
        except ValueError as error:
            raise ValueError(f"{here}: {error}") from None
        api_ns = to_ns(_api_time(entries, number))
        made.append(TraceRequest(at_ns, api_ns, entry.input_tokens, entry.output_tokens, ids))
    return tuple(made)


def _api_time(entries: list[_Entry], number: int) -> float:
    """Seconds the answer took; where it was not recorded, what the next turn's `think_time` leaves of the time between."""
    entry = entries[number]
    if entry.api_time is not None:
        return max(0.0, entry.api_time)
    following = next((e for e in entries[number + 1 :] if e.type != "subagent"), None)
    if following is None or following.think_time is None:
        return 0.0
    return max(0.0, following.t - entry.t - following.think_time)


def parse_session(raw: bytes) -> Session:
    """One session from the bytes of one JSON document. Raises ValueError (or msgspec's) with what is wrong."""
    document = _decoder.decode(raw)
    if document.block_size < 1:
        raise ValueError(f"`block_size` must be at least 1, got {document.block_size}")
    if document.hash_id_scope != "local":
        raise ValueError(f"`hash_id_scope` must be 'local', got {document.hash_id_scope!r}: shared ids are not supported")
    entries = _convert(document.requests, _Blocks(document.block_size), "requests")
    return Session(document.id, document.block_size, entries)


def _documents(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line, JSON text) of each document in a file of one document or one per line."""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except (OSError, EOFError) as error:
        raise FileFormatError(f"{path}: cannot be read ({error}); give a trace file, JSON or JSONL, plain or gzip") from None
    lines = [(number, line) for number, line in enumerate(raw.splitlines(), 1) if line.strip()]
    if len(lines) > 1 and not lines[0][1].rstrip().endswith(b"}"):  # one document over several lines
        try:
            json.loads(raw)
        except ValueError as error:
            at = getattr(error, "lineno", 1)
            raise FileFormatError(f"{path}:{at}: not JSON ({error}); give one session per file or per line") from None
        lines = [(1, raw)]
    yield from lines


def read_sessions(path: Path | str, limit: int | None = None) -> Iterator[Session]:
    """Sessions of a trace file, or of all .json, .jsonl and .gz files in a directory by name, at most `limit`.

    A malformed line raises FileFormatError with "path:line: what is wrong".
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.name.endswith((".json", ".jsonl", ".json.gz", ".jsonl.gz")))
        if not files:
            raise FileFormatError(f"{path}: holds no .json or .jsonl file; give a trace file or a directory of them")
    count = 0
    for file in files:
        for line, raw in _documents(file):
            if limit is not None and count >= limit:
                return
            try:
                session = parse_session(raw)
            except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                raise FileFormatError(f"{file}:{line}: {error}; correct or remove this session") from None
            count += 1
            yield session
