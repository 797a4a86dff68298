"""Output of DeepSeek-V4.1 taken apart while it grows: reasoning, content and tool calls.

What comes out, joined, depends on the text alone and not on how it was cut into pieces. The grammar is the one `dsml` renders;
what models are known to get wrong is put up with, and `Rest.malformed` says so. Model output never raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Literal

from rackserve.text.answers import ArgumentsDelta as ArgumentsDelta
from rackserve.text.answers import CallFinished as CallFinished
from rackserve.text.answers import CallStarted as CallStarted
from rackserve.text.answers import ContentDelta as ContentDelta
from rackserve.text.answers import OutputDelta as OutputDelta
from rackserve.text.answers import ReasoningDelta as ReasoningDelta
from rackserve.text.answers import Rest as Rest
from rackserve.text.dsml import (
    CALLS,
    CALLS_END,
    INVOKE,
    INVOKE_END,
    MARK,
    PARAMETER,
    PARAMETER_END,
    THINK,
    THINK_END,
)
from rackserve.text.dsml_arguments import Arguments

MAX_HEADER = 1024
"""Characters in a tag; a longer one is no tag, and need not be waited for."""

_STRIDE = 4096
"""Characters taken in at a time, so that long pieces are not copied over and over."""


class _Place(Enum):
    """Where the next character belongs."""

    TEXT = "reasoning, content or what follows the calls"
    BLOCK = "between calls"
    CALL = "between the parameters of a call"
    VALUE = "in the value of a parameter"


Channel = Literal["reasoning", "content", "dropped"]

_TEXT_TAGS = (THINK, THINK_END, CALLS, INVOKE)
_BLOCK_TAGS = (INVOKE, CALLS_END)
_CALL_TAGS = (PARAMETER, INVOKE_END, CALLS_END, INVOKE)
_NEXT_PARAMETER = PARAMETER + ' name="'
_VALUE_TAGS = (PARAMETER_END, _NEXT_PARAMETER)
_ATTRIBUTES = re.compile(r'(?: +\w+="[^"]*")* *')
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class DsmlParser:
    """Reads one output. `feed` its text piece by piece, then `finish`.

    reasoning  the output begins inside reasoning (see `dsml.starts_reasoning`)
    tools      parameter names by tool name, where known; only with them is an argument that wraps the others unwrapped
    """

    __slots__ = (
        "_arguments", "_block_calls", "_buffer", "_channel", "_deltas", "_index", "_malformed", "_num_calls", "_opening",
        "_outer", "_place", "_seen", "_tools",
    )  # fmt: skip

    def __init__(self, *, reasoning: bool, tools: Mapping[str, frozenset[str]] | None = None) -> None:
        self._channel: Channel = "reasoning" if reasoning else "content"
        self._tools = tools or {}
        self._place = _Place.TEXT
        self._buffer = ""  # text not understood yet
        self._opening = ""  # what opened the block, to be given back as text if no call follows
        self._outer = False  # the block was opened by its own tag
        self._block_calls = 0  # calls begun in this block
        self._index = -1  # of the latest call
        self._num_calls = 0  # finished
        self._arguments = Arguments(frozenset())
        self._seen = False  # something that is not white space has come out as text
        self._malformed = False
        self._deltas: list[OutputDelta] = []

    def feed(self, text: str) -> list[OutputDelta]:
        """What `text` makes certain."""
        for start in range(0, len(text), _STRIDE):
            self._buffer += text[start : start + _STRIDE]
            while self._buffer and self._advance():
                pass
        return self._take()

    def finish(self) -> Rest:
        """The end of the output; nothing may be fed afterwards."""
        cut = self._channel == "reasoning" or self._place in (_Place.CALL, _Place.VALUE)
        if self._place is _Place.BLOCK:
            cut = self._outer or bool(self._buffer)
        if MARK in self._buffer:  # the beginning of a tag, which is of no use to anyone
            cut = True
        elif self._place is _Place.TEXT:
            self._say(self._buffer)
        elif self._place is _Place.VALUE:
            self._argue(self._arguments.take(self._buffer))
        if self._place in (_Place.CALL, _Place.VALUE):
            self._argue(self._arguments.cut())
        return Rest(self._take(), self._num_calls, cut, self._malformed)

    def _take(self) -> list[OutputDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _advance(self) -> bool:
        """Understand the next part of the buffer; False when more text is needed for that."""
        if self._place is _Place.TEXT:
            return self._in_text()
        if self._place is _Place.VALUE:
            return self._in_value()
        stripped = self._buffer.lstrip()
        if self._place is _Place.BLOCK and not self._block_calls:
            self._opening += self._buffer[: len(self._buffer) - len(stripped)]
        self._buffer = stripped
        if not stripped:
            return False
        return self._in_block() if self._place is _Place.BLOCK else self._in_call()

    def _in_text(self) -> bool:
        start, tag = _first(self._buffer, _TEXT_TAGS)
        if not tag:
            sure = len(self._buffer) - _pending(self._buffer, _TEXT_TAGS)
            self._say(self._buffer[: _before_breaks(self._buffer, sure)])
            self._buffer = self._buffer[_before_breaks(self._buffer, sure) :]
            return False
        if tag in (THINK, THINK_END):
            self._say(self._buffer[:start])
            self._think(tag)
            self._buffer = self._buffer[start + len(tag) :]
            return True
        end = _before_breaks(self._buffer, start)
        self._say(self._buffer[:end])
        self._opening = self._buffer[end:start]
        self._buffer = self._buffer[start:]
        self._outer = tag == CALLS
        if self._outer:
            self._opening += CALLS
            self._buffer = self._buffer[len(CALLS) :]
        else:
            self._malformed = True  # a call outside a block
        self._malformed |= self._channel == "reasoning"
        self._place = _Place.BLOCK
        self._block_calls = 0
        return True

    def _think(self, tag: str) -> None:
        """A think tag: it switches where it belongs and is left out elsewhere; it is never text."""
        if tag == THINK_END and self._channel == "reasoning":
            self._channel = "content"
            self._seen = False
        elif tag == THINK and self._channel == "content" and not self._seen:
            self._channel = "reasoning"
            self._malformed = True
        else:
            self._malformed = True

    def _in_block(self) -> bool:
        tag = _at_start(self._buffer, _BLOCK_TAGS)
        if tag is None:
            return False
        if tag == CALLS_END:
            self._malformed = self._malformed or not self._block_calls
            self._buffer = self._buffer[len(CALLS_END) :]
            self._channel = "dropped"
            self._place = _Place.TEXT
            return True
        if tag == INVOKE:
            header = _header(self._buffer, len(INVOKE))
            if header is None:
                return False
            end, attributes = header
            if attributes.get("name"):
                self._buffer = self._buffer[end:]
                self._start_call(attributes["name"])
                return True
        self._malformed = True
        self._place = _Place.TEXT
        if not self._block_calls:  # no block after all, but text that names the tag
            self._say(self._opening)
        self._say(tag)
        self._buffer = self._buffer[len(tag) :]
        return True

    def _start_call(self, name: str) -> None:
        self._block_calls += 1
        self._index += 1
        self._arguments = Arguments(self._tools.get(name, frozenset()))
        self._deltas.append(CallStarted(self._index, name))
        self._channel = "dropped"  # whatever is not a call from here on
        self._place = _Place.CALL

    def _in_call(self) -> bool:
        tag = _at_start(self._buffer, _CALL_TAGS)
        if tag is None:
            return False
        if tag == PARAMETER:
            header = _header(self._buffer, len(PARAMETER))
            if header is None:
                return False
            end, attributes = header
            if "name" in attributes:
                self._buffer = self._buffer[end:]
                self._malformed |= attributes.get("string") not in ("true", "false")
                self._malformed |= self._arguments.has(attributes["name"])
                self._argue(self._arguments.open(attributes["name"], attributes.get("string")))
                self._place = _Place.VALUE
                return True
        if not tag or tag == PARAMETER:
            self._malformed = True  # something that is no parameter: leave it out
            self._buffer = self._buffer[max(1, len(tag)) :]
            return True
        if tag == INVOKE_END:
            self._buffer = self._buffer[len(INVOKE_END) :]
        else:
            self._malformed = True
        self._argue(self._arguments.finish())
        self._deltas.append(CallFinished(self._index))
        self._num_calls += 1
        self._place = _Place.BLOCK
        return True

    def _in_value(self) -> bool:
        start, tag = _first(self._buffer, _VALUE_TAGS)
        sure = start if tag else len(self._buffer) - _pending(self._buffer, _VALUE_TAGS)
        self._argue(self._arguments.take(self._buffer[:sure]))
        self._buffer = self._buffer[sure:]
        if not tag:
            return False
        self._argue(self._arguments.close())
        if tag == PARAMETER_END:
            self._buffer = self._buffer[len(tag) :]
        else:
            self._malformed = True
        self._place = _Place.CALL
        return True

    def _say(self, text: str) -> None:
        """Let text out where it belongs."""
        if not text:
            return
        self._seen = self._seen or not text.isspace()
        if self._channel == "dropped":
            self._malformed = self._malformed or not text.isspace()
        else:
            self._deltas.append(ReasoningDelta(text) if self._channel == "reasoning" else ContentDelta(text))

    def _argue(self, text: str) -> None:
        if text:
            self._deltas.append(ArgumentsDelta(self._index, text))


def _first(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """Place and name of the first of `tags` in `text`; (-1, "") if there is none."""
    places = [(place, tag) for tag in tags if (place := text.find(tag)) >= 0]
    return min(places, default=(-1, ""))


def _at_start(text: str, tags: tuple[str, ...]) -> str | None:
    """The tag with which `text` begins, "" if with none, None if that cannot be told yet."""
    for tag in tags:
        if text.startswith(tag):
            return tag
    return None if any(tag.startswith(text) for tag in tags) else ""


def _pending(text: str, tags: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of a tag. Tags hold one `<`, at their beginning."""
    start = text.rfind("<")
    tail = text[start:] if start >= 0 else ""
    return len(tail) if tail and any(tag.startswith(tail) for tag in tags) else 0


def _before_breaks(text: str, end: int) -> int:
    """`end` less the line breaks before it that belong to a block which begins there: two at most."""
    if text[max(0, end - 2) : end] == "\n\n":
        return end - 2
    return end - 1 if text[max(0, end - 1) : end] == "\n" else end


def _header(text: str, start: int) -> tuple[int, dict[str, str]] | None:
    """End and attributes of the tag whose attributes begin at `start`, none if it is malformed; None if its end is to come."""
    quoted = False
    for place in range(start, min(len(text), MAX_HEADER)):
        character = text[place]
        if character == "\n":
            return start, {}
        if character == '"':
            quoted = not quoted
        elif character == ">" and not quoted:
            attributes = text[start:place]
            return place + 1, dict(_ATTRIBUTE.findall(attributes)) if _ATTRIBUTES.fullmatch(attributes) else {}
    return None if len(text) < MAX_HEADER else (start, {})
