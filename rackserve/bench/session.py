"""A recorded agent session: requests and the conversations it started, with ids for the blocks of each prompt.

Ids are chained: an id names its block and all blocks before it, within its session (or, if shared, within its trace).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rackserve.base.units import Time

HASH_ID_BYTES = 4

MAX_TIME_S = 1e9
"""No time of a trace is larger."""

MAX_TOKENS = 10**9
"""No prompt or answer of a trace is longer."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One recorded call.

    at_ns         when it was sent, counted from the start of its session (or of its subagent)
    api_ns        how long the recorded answer took
    input_tokens, output_tokens   as recorded (or scaled)
    hash_ids      ids of the full prompt blocks, int32 little-endian
    model         which model was asked in the recording; only told apart, never asked for
    """

    at_ns: Time
    api_ns: Time
    input_tokens: int
    output_tokens: int
    hash_ids: bytes
    model: str = ""

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
    """One recorded session.

    block_tokens   tokens behind each hash id (64 unless scaled)
    shared         its hash ids mean the same in every session of the trace; else they are its own
    start_ns       when it began, from the start of the recording; only an open-loop replay at recorded times looks at it
    """

    id: str
    block_tokens: int
    entries: tuple[TraceRequest | Subagent, ...]
    shared: bool = False
    start_ns: Time = 0

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
