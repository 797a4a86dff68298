"""The sessions that published figures are simulated with, in blocks as large as the rack serves."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.bench.session import Session, Subagent, TraceRequest
from rackserve.bench.synth import synthesize
from rackserve.bench.trace import read_sessions


def agent_sessions(count: int, block_tokens: int, trace: Path | None = None, seed: int = 42) -> tuple[Session, ...]:
    """`count` sessions of a trace, or drawn like those of the published corpus, in blocks of `block_tokens`."""
    sessions: Iterable[Session] = read_sessions(trace) if trace else synthesize(count, seed)
    return tuple(coarsened(session, block_tokens) for session in islice(sessions, count))


def coarsened(session: Session, block_tokens: int) -> Session:
    """The session in larger blocks: an id names its block and all before it, so the last id of each larger block names that.

    Tokens beyond the last larger block have no id. ConfigError unless the larger block is a whole number of the smaller.
    """
    ratio, rest = divmod(block_tokens, session.block_tokens)
    if rest or not ratio:
        raise ConfigError(f"blocks of {session.block_tokens} tokens cannot be joined to {block_tokens}; use another trace")

    def entries(parts: tuple[TraceRequest | Subagent, ...]) -> tuple[TraceRequest | Subagent, ...]:
        return tuple(
            msgspec.structs.replace(part, entries=entries(part.entries))
            if isinstance(part, Subagent)
            else msgspec.structs.replace(part, hash_ids=memoryview(part.hash_ids).cast("i")[ratio - 1 :: ratio].tobytes())
            for part in parts
        )

    return msgspec.structs.replace(session, block_tokens=block_tokens, entries=entries(session.entries))
