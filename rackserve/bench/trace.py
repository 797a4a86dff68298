"""Reads trace files of every known format: sessions, one JSON document each, in a file or a folder, plain or gzip."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.bench.id_chain import IdChain
from rackserve.bench.mooncake import BLOCK_TOKENS, parse_mooncake
from rackserve.bench.native import parse_native
from rackserve.bench.session import Session
from rackserve.bench.weka import parse_weka


class _Probe(msgspec.Struct):
    """What tells the formats apart."""

    rackserve_trace: object = None
    input_length: object = None


_probe = msgspec.json.Decoder(_Probe)


def _parser(first: bytes) -> Callable[[bytes, int], Session]:
    """What reads a document of the file that begins with `first`."""
    shape = _probe.decode(first)
    if shape.rackserve_trace is not None:
        shared: IdChain | None = None

        def native(raw: bytes, number: int) -> Session:
            nonlocal shared
            session, shared = parse_native(raw, shared)
            return session

        return native
    if shape.input_length is not None:
        ids = IdChain(BLOCK_TOKENS)
        return lambda raw, number: parse_mooncake(raw, number, ids)
    return lambda raw, number: parse_weka(raw)


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

    The format (Weka, native or compact; Mooncake; rackserve's own) is seen from each file's first document. A malformed line
    raises FileFormatError with "path:line: what is wrong", a trace without sessions one that names it.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.name.endswith((".json", ".jsonl", ".json.gz", ".jsonl.gz")))
        if not files:
            raise FileFormatError(f"{path}: holds no .json or .jsonl file; give a trace file or a directory of them")
    count = 0
    for file in files:
        parse: Callable[[bytes, int], Session] | None = None
        for line, raw in _documents(file):
            if limit is not None and count >= limit:
                return
            try:
                parse = parse or _parser(raw)
                session = parse(raw, line)
            except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                raise FileFormatError(f"{file}:{line}: {error}; correct or remove this session") from None
            count += 1
            yield session
    if not count:
        raise FileFormatError(f"{path}: holds no session; give a trace with at least one")
