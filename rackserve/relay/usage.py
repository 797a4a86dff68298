"""What an answer says at its end about its prompt: how long it was, and how much of it was cached."""

from __future__ import annotations

import re
from typing import NamedTuple

HEAD_BYTES = 2048
TAIL_BYTES = 8192
"""Usage stands within so much of an answer's end, or of its beginning."""

_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,10})\b')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,10})\b')
_ANTHROPIC = b'"cache_read_input_tokens"'


class Usage(NamedTuple):
    """Tokens of a prompt, and of those cached."""

    prompt_tokens: int
    cached_tokens: int

    @property
    def share(self) -> float:
        """Cached part of the prompt."""
        return min(1.0, self.cached_tokens / max(1, self.prompt_tokens))


def usage_in(tail: bytes) -> Usage | None:
    """The usage told last in `tail`, the end of an answer; None if it tells none, or nothing about the cache.

    Quotes inside the answer's own text are escaped, so it cannot pose as usage.
    """
    prompt, cached = _PROMPT.findall(tail), _CACHED.findall(tail)
    if not prompt or not cached:
        return None
    tokens, held = int(prompt[-1]), int(cached[-1])
    if _ANTHROPIC in tail and b'"prompt_tokens"' not in tail:
        tokens += held  # this dialect counts the two apart
    return Usage(tokens, held)


class Ends:
    """The first and the last bytes of an answer that passes: one dialect tells of the prompt in its first event."""

    __slots__ = ("_head", "_tail")

    def __init__(self) -> None:
        self._head: bytes | None = None
        self._tail = b""

    def add(self, piece: bytes) -> None:
        """`piece` came next."""
        if self._head is None:
            self._head = piece[:HEAD_BYTES]
        self._tail = piece[-TAIL_BYTES:] if len(piece) >= TAIL_BYTES else (self._tail + piece)[-TAIL_BYTES:]

    @property
    def usage(self) -> Usage | None:
        return usage_in(self._tail) or usage_in(self._head or b"")
