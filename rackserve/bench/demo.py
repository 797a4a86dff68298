"""The sessions that ship with rackserve: real recordings, cut short; source and licence in data/NOTICE."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from rackserve.bench.scale import ScaledTrace, scale_sessions
from rackserve.bench.session import Session
from rackserve.bench.trace import read_sessions

DEMO_SCALE = 32
"""Trace blocks of 64 tokens become 2 tokens: prompts of 500 to 1,100 tokens, which a CPU model can serve."""


def demo_sessions() -> tuple[Session, ...]:
    """The shipped sessions as recorded."""
    return tuple(read_sessions(Path(str(files("rackserve.bench") / "data" / "demo_sessions.jsonl.gz"))))


def demo_trace(*, scale: int = DEMO_SCALE, time_scale: float = 100.0, max_context: int = 0, max_turns: int = 0) -> ScaledTrace:
    """The shipped sessions, scaled for a small machine."""
    return scale_sessions(demo_sessions(), scale=scale, time_scale=time_scale, max_context=max_context, max_turns=max_turns)
