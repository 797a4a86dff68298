"""An operator's own traffic as a trace: lengths, times, sessions and which blocks prompts share; never what they say.

`serve --record FILE` writes one line per ended request. Block keys and session names go in as digests under a secret drawn for
the run and kept nowhere, so nothing can be looked up from the outside and two runs have nothing in common.
`rackserve record FILE` then numbers the digests and writes sessions in the trace format.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.base.ids import NodeId
from rackserve.base.keys import KEY_BYTES, Chain, common_blocks, count, key_at
from rackserve.base.messages import Message, Output, Submit
from rackserve.base.request import Request
from rackserve.base.units import NS_PER_S, Time, to_ns
from rackserve.bench.native import write_sessions
from rackserve.bench.session import HASH_ID_BYTES, Session, TraceRequest
from rackserve.ports import Node, Transport

log = logging.getLogger(__name__)

DIGEST_BYTES = 8
MAX_CHAIN_BYTES = 64 << 20
"""Keys of sessions' last prompts that are kept to write only what is new; beyond it the longest idle session is forgotten."""


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rackserve_traffic: Literal[1]
    block_tokens: int


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One ended request. `at`: seconds from the recording's start; `keep`: leading blocks as in the session's last line."""

    session: str
    at: float
    took: float
    input: int
    output: int
    keep: int
    new: str = ""
    error: str = ""


class TrafficLog:
    """Writes down what passes between the HTTP front end and the frontend node. About a microsecond per new block of a prompt.

    When the file cannot be written, that is said once and nothing more is recorded: serving goes on.
    """

    __slots__ = ("_chain_bytes", "_chains", "_encoder", "_file", "_now", "_open", "_path", "_salt", "_start")

    def __init__(
        self, path: Path | str, block_tokens: int, *, salt: bytes | None = None, now: Callable[[], Time] = time.monotonic_ns
    ) -> None:
        self._path = Path(path)
        self._salt = salt or secrets.token_bytes(32)
        self._now = now
        self._start = now()
        self._encoder = msgspec.json.Encoder()
        self._open: dict[str, tuple[Time, Request]] = {}
        self._chains: OrderedDict[str, Chain] = OrderedDict()
        self._chain_bytes = 0
        try:
            self._file = self._path.open("wb")
            self._write(_Head(1, block_tokens))
        except OSError as error:
            raise FileFormatError(f"{path}: cannot be written ({error.strerror}); choose another with --record") from error

    def around_node(self, node: Node) -> Node:
        """`node`, with the ends of its requests written down."""
        return _RecordedNode(node, self)

    def around_transport(self, transport: Transport) -> Transport:
        """`transport`, with the requests sent through it written down once they end."""
        return _RecordedTransport(transport, self)

    def began(self, request: Request) -> None:
        """A request was submitted."""
        bare = msgspec.structs.replace(request, tokens=b"")
        self._open[request.id] = (self._now(), bare)

    def ended(self, output: Output) -> None:
        """The last output of a request; earlier ones are ignored."""
        if output.finish is None and output.error is None:
            return
        began, request = self._open.pop(output.request, (0, None))
        if request is None or self._file.closed:
            return
        session = self._digest(request.session.encode()).hex()
        keep = self._keep(session, request.chain)
        new = b"".join(self._digest(key_at(request.chain, n)) for n in range(keep, count(request.chain)))
        at, took = ((ns / NS_PER_S) for ns in (began - self._start, self._now() - began))
        made = output.usage.output_tokens if output.usage else output.index + len(output.tokens)
        line = _Line(session, at, took, request.num_tokens, made, keep, new.hex(), output.error or "")
        try:
            self._write(line)
        except OSError as error:
            log.error("%s: %s; no more traffic is recorded there", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file; requests still open are not in it."""
        try:
            self._file.close()
        except OSError as error:
            log.error("%s: %s; the end of the recording may be missing", self._path, error.strerror)

    def _keep(self, session: str, chain: Chain) -> int:
        before = self._chains.pop(session, b"")
        self._chains[session] = chain
        self._chain_bytes += len(chain) - len(before)
        while self._chain_bytes > MAX_CHAIN_BYTES and len(self._chains) > 1:
            self._chain_bytes -= len(self._chains.popitem(last=False)[1])
        return common_blocks(before, 0, chain, 0) if before[:KEY_BYTES] == chain[:KEY_BYTES] else 0

    def _digest(self, name: bytes) -> bytes:
        return blake2b(name, key=self._salt, digest_size=DIGEST_BYTES).digest()

    def _write(self, line: _Head | _Line) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")
        self._file.flush()


@dataclass(frozen=True, slots=True)
class _RecordedNode:
    node: Node
    traffic: TrafficLog

    def handle(self, message: Message) -> None:
        if isinstance(message, Output):
            self.traffic.ended(message)
        self.node.handle(message)


@dataclass(frozen=True, slots=True)
class _RecordedTransport:
    transport: Transport
    traffic: TrafficLog

    def send(self, to: NodeId, message: Message) -> None:
        if isinstance(message, Submit):
            self.traffic.began(message.request)
        self.transport.send(to, message)


# ---------------------------------------------------------------- from a recording to a trace


def _lines(path: Path) -> Iterator[tuple[int, _Head | _Line]]:
    head, line = msgspec.json.Decoder(_Head), msgspec.json.Decoder(_Line)
    number = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):  # the server was killed while it wrote
                    return
                yield number, (line if number > 1 else head).decode(raw)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}); give what serve --record wrote") from None
    except msgspec.MsgspecError as error:
        raise FileFormatError(f"{path}:{number}: {error}; give what serve --record wrote") from None
    if not number:
        raise FileFormatError(f"{path}: is empty; give what serve --record wrote")


def read_traffic(path: Path | str) -> tuple[list[Session], int]:
    """(sessions of a recording by their first request, how many failed requests were left out). The first begins at 0.

    Block ids are numbered in order of appearance and mean the same in all sessions, so what prompts share stays shared.
    Raises FileFormatError, with path and line, for a file that is no recording. A half-written last line is left out.
    """
    path = Path(path)
    ids: dict[bytes, int] = {}
    chains: dict[str, bytes] = {}
    found: list[tuple[str, float, TraceRequest]] = []
    block_tokens, num_failed = 0, 0
    for number, line in _lines(path):
        if isinstance(line, _Head):
            block_tokens = line.block_tokens
            continue
        before = chains.get(line.session, b"")
        try:
            new = bytes.fromhex(line.new)
        except ValueError:
            raise FileFormatError(f"{path}:{number}: `new` is not hexadecimal; the recording is damaged") from None
        if not 0 <= line.keep * HASH_ID_BYTES <= len(before) or len(new) % DIGEST_BYTES or line.input < 1 or line.at < 0:
            raise FileFormatError(f"{path}:{number}: `keep`, `new`, `input` or `at` cannot be; the recording is damaged")
        fresh = (new[at : at + DIGEST_BYTES] for at in range(0, len(new), DIGEST_BYTES))
        numbers = b"".join(ids.setdefault(digest, len(ids)).to_bytes(HASH_ID_BYTES, "little") for digest in fresh)
        chains[line.session] = hash_ids = before[: line.keep * HASH_ID_BYTES] + numbers
        if line.error:
            num_failed += 1
            continue
        request = TraceRequest(to_ns(line.at), to_ns(line.took), line.input, line.output, hash_ids)
        found.append((line.session, line.at, request))
    starts: dict[str, float] = {}
    for session, at, _ in found:
        starts[session] = min(at, starts.get(session, at))
    found.sort(key=lambda item: (starts[item[0]], item[0], item[1]))
    sessions = []
    for number, (_, group) in enumerate(groupby(found, key=lambda item: item[0])):
        requests = [request for _, _, request in group]
        zero = requests[0].at_ns
        entries = tuple(msgspec.structs.replace(request, at_ns=request.at_ns - zero) for request in requests)
        sessions.append(Session(f"s{number:06}", block_tokens, entries, shared=True, start_ns=zero - found[0][2].at_ns))
    return sessions, num_failed


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("recording", metavar="FILE", help="what `serve --record` wrote")
    command.add_argument(
        "--out", required=True, metavar="TRACE", help="trace file to write, compressed if its name ends with .gz"
    )


def record(options: argparse.Namespace) -> int:
    """Turn a recording of traffic into a trace."""
    sessions, num_failed = read_traffic(options.recording)
    if not sessions:
        raise FileFormatError(f"{options.recording}: holds no request that ended well; record for longer")
    write_sessions(options.out, sessions)
    count_of = sum(session.num_requests for session in sessions)
    print(f"{options.out}: {len(sessions)} sessions, {count_of} requests; {num_failed} failed requests left out")
    return 0
