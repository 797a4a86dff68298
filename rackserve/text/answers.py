"""Answers taken apart while they grow: their pieces, what every parser of model output provides, and the one for plain text."""

from __future__ import annotations

from typing import Protocol

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More reasoning."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """A tool call begins; calls are numbered from 0."""

    index: int
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """More of the arguments of call `index`; joined they are a JSON object once the call has finished."""

    index: int
    text: str


class CallFinished(msgspec.Struct, frozen=True):
    """Call `index` is complete. A call that never gets this must not be carried out."""

    index: int


OutputDelta = ReasoningDelta | ContentDelta | CallStarted | ArgumentsDelta | CallFinished


class Rest(msgspec.Struct, frozen=True):
    """The end of an output.

    deltas     what was held back
    num_calls  calls that finished
    cut        the output ended inside its reasoning, a tag or a call
    malformed  the output broke the grammar somewhere, and this is the best that could be made of it
    """

    deltas: list[OutputDelta]
    num_calls: int
    cut: bool
    malformed: bool


class AnswerParser(Protocol):
    """Takes one answer apart while it grows: `feed` its text piece by piece, then `finish`.

    What comes out, joined, depends on the text alone and not on how it was cut into pieces; text waits only while it may be
    markup. Nothing a model writes raises.
    """

    def feed(self, text: str) -> list[OutputDelta]:
        """What `text` makes certain."""
        ...

    def finish(self) -> Rest:
        """The end of the answer; nothing may be fed afterwards."""
        ...


class PlainParser:
    """All text is content."""

    __slots__ = ()

    def feed(self, text: str) -> list[OutputDelta]:
        """The text."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> Rest:
        """Nothing was held back."""
        return Rest([], 0, cut=False, malformed=False)
