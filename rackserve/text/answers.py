"""Answers taken apart while they grow: what every parser of model output provides, and the one for plain text."""

from __future__ import annotations

from typing import Protocol

from rackserve.text.dsml_parser import ContentDelta, OutputDelta, Rest


class AnswerParser(Protocol):
    """Reads one answer. What comes out, joined, depends on the text alone and not on how it was cut; never raises."""

    def feed(self, text: str) -> list[OutputDelta]:
        """What more of the text lets go."""
        ...

    def finish(self) -> Rest:
        """The end: what was held back, and whether the answer was whole."""
        ...


class PlainParser:
    """All text is content."""

    __slots__ = ()

    def feed(self, text: str) -> list[OutputDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> Rest:
        return Rest([], 0, False, False)
