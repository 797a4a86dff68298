"""Reasoning between `<think>` tags, in front of whatever else an answer holds."""

from __future__ import annotations

import msgspec

from rackserve.text.answers import AnswerParser, OutputDelta, ReasoningDelta, Rest

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """Reads one answer; see `AnswerParser`. Behind the reasoning, `inner` reads on.

    inside   the answer begins inside its reasoning, because the prompt ends with the tag that opens it; the model may repeat
             the tag. Else it reasons if it begins with the tag; white space before a tag is dropped.

    Tags anywhere else are text.
    """

    __slots__ = ("_buffer", "_inner", "_opening", "_reasons")

    def __init__(self, inner: AnswerParser, *, inside: bool) -> None:
        self._inner = inner
        self._buffer = ""
        self._opening = True  # nothing but white space so far
        self._reasons = inside

    def feed(self, text: str) -> list[OutputDelta]:
        """What `text` makes certain."""
        if not self._opening and not self._reasons:
            return self._inner.feed(text)
        self._buffer += text
        if self._opening:
            stripped = self._buffer.lstrip()
            if OPEN.startswith(stripped) and stripped != OPEN:
                return []
            self._opening = False
            if stripped.startswith(OPEN):
                self._buffer, self._reasons = stripped[len(OPEN) :], True
        if not self._reasons:
            text, self._buffer = self._buffer, ""
            return self._inner.feed(text)
        end = self._buffer.find(CLOSE)
        if end >= 0:
            self._reasons = False
            thought, text, self._buffer = self._buffer[:end], self._buffer[end + len(CLOSE) :], ""
            return _reasoning(thought) + self._inner.feed(text)
        held = next((size for size in range(len(CLOSE) - 1, 0, -1) if self._buffer.endswith(CLOSE[:size])), 0)
        thought = self._buffer[: len(self._buffer) - held]
        self._buffer = self._buffer[len(thought) :]
        return _reasoning(thought)

    def finish(self) -> Rest:
        """The end of the answer; `cut` also if it ends inside its reasoning."""
        if self._reasons:
            rest = self._inner.finish()
            return msgspec.structs.replace(rest, deltas=_reasoning(self._buffer) + rest.deltas, cut=True)
        held = self._inner.feed(self._buffer)
        rest = self._inner.finish()
        return msgspec.structs.replace(rest, deltas=held + rest.deltas)


def _reasoning(text: str) -> list[OutputDelta]:
    return [ReasoningDelta(text)] if text else []
