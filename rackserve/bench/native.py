"""rackserve's own trace format: what any recorder can write without keeping a prompt. docs/traces.md describes it."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.base.units import NS_PER_S, to_ns
from rackserve.bench.id_chain import IdChain
from rackserve.bench.session import MAX_TIME_S, MAX_TOKENS, Session, Subagent, TraceRequest

FORMAT: Literal[1] = 1


class _Entry(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    at: float
    took: float = 0.0
    input: int = 0
    output: int = 0
    keep: int = 0
    new: list[tuple[int, int]] = []
    model: str = ""
    agent: str | None = None
    until: float = 0.0
    requests: list[_Entry] = []


class _Document(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    rackserve_trace: Literal[1]
    id: str
    block_tokens: int
    requests: list[_Entry]
    shared: bool = False
    start: float = 0.0


_decoder = msgspec.json.Decoder(_Document)
_encoder = msgspec.json.Encoder()


def parse_native(raw: bytes, shared: IdChain | None) -> tuple[Session, IdChain | None]:
    """One session from one line, and the id chain for the next line if ids are shared (`shared`: that of the line before).

    Raises ValueError (or msgspec's) with what is wrong.
    """
    document = _decoder.decode(raw)
    ids = shared if document.shared and shared is not None else IdChain(document.block_tokens)
    if ids.block_tokens != document.block_tokens:
        raise ValueError(f"`block_tokens` is {document.block_tokens} after {ids.block_tokens}; shared ids need one block size")
    if not 0 <= document.start <= MAX_TIME_S:
        raise ValueError(f"`start` must be from 0 to {MAX_TIME_S:g} seconds, got {document.start}")
    entries = _convert(document.requests, ids, "requests")
    session = Session(document.id, document.block_tokens, entries, document.shared, to_ns(document.start))
    return session, ids if document.shared else None


def _convert(entries: list[_Entry], ids: IdChain, where: str) -> tuple[TraceRequest | Subagent, ...]:
    made: list[TraceRequest | Subagent] = []
    for number, entry in enumerate(entries):
        here = f"{where}[{number}]"
        for name, seconds in (("at", entry.at), ("took", entry.took), ("until", entry.until)):
            if not 0 <= seconds <= MAX_TIME_S:
                raise ValueError(f"{here}: `{name}` must be from 0 to {MAX_TIME_S:g} seconds, got {seconds}")
        if entry.agent is not None:
            inner = _convert(entry.requests, ids, f"{here}.requests")
            made.append(Subagent(entry.agent, to_ns(entry.at), to_ns(entry.until), inner))
            continue
        if not 1 <= entry.input <= MAX_TOKENS or not 0 <= entry.output <= MAX_TOKENS:
            raise ValueError(f"{here}: `input` must be at least 1 and `output` at least 0, both at most {MAX_TOKENS}")
        try:
            hash_ids = ids.packed(entry.keep, entry.new, entry.input)
        except ValueError as error:
            raise ValueError(f"{here}: {error}") from None
        made.append(TraceRequest(to_ns(entry.at), to_ns(entry.took), entry.input, entry.output, hash_ids, entry.model))
    return tuple(made)


def write_sessions(path: Path | str, sessions: Iterable[Session]) -> None:
    """Write sessions one a line, compressed if the name ends with .gz."""
    path = Path(path)
    try:
        with gzip.open(path, "wb", compresslevel=5) if path.name.endswith(".gz") else path.open("wb") as file:
            shared: IdChain | None = None
            for session in sessions:
                ids = shared if session.shared and shared is not None else IdChain(session.block_tokens)
                shared = ids if session.shared else None
                entries = [_entry(entry, ids) for entry in session.entries]
                start = session.start_ns / NS_PER_S
                document = _Document(FORMAT, session.id, session.block_tokens, entries, session.shared, start)
                file.write(_encoder.encode(document) + b"\n")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def _entry(entry: TraceRequest | Subagent, ids: IdChain) -> _Entry:
    at = entry.at_ns / NS_PER_S
    if isinstance(entry, Subagent):
        inner = [_entry(part, ids) for part in entry.entries]
        return _Entry(at, agent=entry.id, until=entry.end_ns / NS_PER_S, requests=inner)
    keep, new = ids.pack(entry.hash_ids)
    return _Entry(at, entry.api_ns / NS_PER_S, entry.input_tokens, entry.output_tokens, keep, new, entry.model)
