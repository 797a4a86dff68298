"""Tool calls as Llama- and Qwen-class models write them: JSON objects with `name` and `arguments` in `<tool_call>` tags."""

from __future__ import annotations

import json
import re
from enum import Enum

from rackserve.text.answers import (
    ArgumentsDelta,
    CallFinished,
    CallStarted,
    ContentDelta,
    OutputDelta,
    Rest,
)
from rackserve.text.json_scanner import JsonScanner, Scan

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_SPACE = re.compile(r"\s*")


class _Place(Enum):
    TEXT = "content, or white space after a call"
    OBJECT = "before the object of a call"
    FIRST_KEY = "before its first key, or its end"
    KEY = "before another key"
    KEY_TEXT = "in a key"
    COLON = "between key and value"
    VALUE = "before a value"
    VALUE_TEXT = "in a value"
    NEXT = "after a value"
    CLOSE = "after the object"


class HermesParser:
    """Reads one answer; see `AnswerParser`.

    The arguments of a call are passed on as they come, once its name is known: exactly the JSON object that the model wrote.
    What turns out to be no call before that comes out as content, markup and all. A call that breaks later never finishes,
    and its text from there on is content. White space between and behind calls is dropped.
    """

    __slots__ = (
        "_after_call", "_arguments", "_buffer", "_deltas", "_index", "_key", "_malformed", "_name", "_num_calls", "_place",
        "_raw", "_scanner", "_started", "_value",
    )  # fmt: skip

    def __init__(self) -> None:
        self._place = _Place.TEXT
        self._buffer = ""  # text not understood yet
        self._raw = ""  # of a call not started yet, to be given back as content
        self._scanner = JsonScanner()
        self._key = ""
        self._value = ""  # text of the key or value being read, if it is kept
        self._name: str | None = None
        self._arguments: str | None = None  # complete, but waiting for the name
        self._started = False
        self._after_call = False  # a call was read, and nothing but white space since
        self._index = -1
        self._num_calls = 0
        self._malformed = False
        self._deltas: list[OutputDelta] = []

    def feed(self, text: str) -> list[OutputDelta]:
        """What `text` makes certain."""
        self._buffer += text
        while self._buffer and self._advance():
            pass
        return self._take()

    def finish(self) -> Rest:
        """The end of the answer: the beginning of a call that has no name yet is content."""
        cut = self._place not in (_Place.TEXT, _Place.CLOSE)
        self._malformed |= self._place is _Place.CLOSE
        held = self._buffer
        if cut:
            self._give_back()
        if not (self._after_call and not held.strip()):
            self._say(held)
        return Rest(self._take(), self._num_calls, cut, self._malformed)

    def _take(self) -> list[OutputDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _say(self, text: str) -> None:
        if text:
            self._after_call = False
            self._deltas.append(ContentDelta(text))

    def _advance(self) -> bool:
        """Understand the next part of the buffer; False when more text is needed for that."""
        if self._place is _Place.TEXT:
            return self._in_text()
        if self._place in (_Place.KEY_TEXT, _Place.VALUE_TEXT):
            return self._in_json()
        found = _SPACE.match(self._buffer)
        self._consume(found.end() if found else 0)
        if not self._buffer:
            return False
        if self._place is _Place.CLOSE:
            return self._at_close()
        return self._at_mark(self._buffer[0])

    def _consume(self, length: int) -> str:
        """Take that much off the buffer; kept while it may have to be given back."""
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if not self._started and self._place is not _Place.CLOSE:
            self._raw += text
        return text

    def _in_text(self) -> bool:
        if self._after_call:
            stripped = self._buffer.lstrip()
            if not stripped or (OPEN.startswith(stripped) and stripped != OPEN):
                return False
            if stripped.startswith(OPEN):
                self._buffer = stripped
        start = self._buffer.find(OPEN)
        if start < 0:
            held = next((size for size in range(len(OPEN) - 1, 0, -1) if self._buffer.endswith(OPEN[:size])), 0)
            end = len(self._buffer) - held
            self._say(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        self._say(self._buffer[:start])
        self._buffer = self._buffer[start + len(OPEN) :]
        self._raw, self._place = OPEN, _Place.OBJECT
        self._name = self._arguments = None
        self._started = False
        return True

    def _at_mark(self, character: str) -> bool:
        """The next character that is not white space, between the parts of the object."""
        place = self._place
        if place is _Place.OBJECT and character == "{":
            self._consume(1)
            self._place = _Place.FIRST_KEY
        elif place in (_Place.FIRST_KEY, _Place.KEY) and character == '"':
            self._scanner, self._value, self._place = JsonScanner(), "", _Place.KEY_TEXT
        elif place is _Place.COLON and character == ":":
            self._consume(1)
            self._place = _Place.VALUE
        elif place is _Place.VALUE:
            return self._begin_value(character)
        elif place is _Place.NEXT and character == ",":
            self._consume(1)
            self._place = _Place.KEY
        elif place is _Place.NEXT and character == "}":
            return self._end_call()
        else:
            return self._break()
        return True

    def _begin_value(self, character: str) -> bool:
        first = {"name": '"', "arguments": "{"}.get(self._key, character)
        twice = (self._key == "name" and self._name is not None) or (
            self._key == "arguments" and (self._started or self._arguments is not None)
        )
        if character != first or twice:
            return self._break()
        self._scanner, self._value, self._place = JsonScanner(), "", _Place.VALUE_TEXT
        if self._key == "arguments" and self._name is not None:
            self._start_call()
        return True

    def _start_call(self) -> None:
        self._index += 1
        self._started = True
        self._raw = ""
        self._deltas.append(CallStarted(self._index, self._name or ""))

    def _in_json(self) -> bool:
        """In a key or value."""
        length, scan = self._scanner.scan(self._buffer)
        text = self._consume(length)
        if self._place is _Place.VALUE_TEXT and self._key == "arguments" and self._started:
            if text:
                self._deltas.append(ArgumentsDelta(self._index, text))
        elif self._place is _Place.KEY_TEXT or self._key in ("name", "arguments"):
            self._value += text
        if scan is Scan.BROKEN:
            return self._break()
        if scan is Scan.MORE:
            return False
        if self._place is _Place.KEY_TEXT:
            self._key = json.loads(self._value)
            self._place = _Place.COLON
            return True
        self._place = _Place.NEXT
        if self._key == "name":
            self._name = json.loads(self._value)
            if not self._name:
                return self._break()
        elif self._key == "arguments" and not self._started:
            self._arguments = self._value
        if self._arguments is not None and self._name is not None and not self._started:
            self._start_call()
            self._deltas.append(ArgumentsDelta(self._index, self._arguments))
        return True

    def _end_call(self) -> bool:
        if self._name is None:
            return self._break()
        self._consume(1)
        if not self._started:
            self._start_call()
            self._deltas.append(ArgumentsDelta(self._index, "{}"))
        self._deltas.append(CallFinished(self._index))
        self._num_calls += 1
        self._after_call = True
        self._place = _Place.CLOSE
        return True

    def _at_close(self) -> bool:
        if CLOSE.startswith(self._buffer) and self._buffer != CLOSE:
            return False
        if self._buffer.startswith(CLOSE):
            self._buffer = self._buffer[len(CLOSE) :]
        else:
            self._malformed = True
        self._place = _Place.TEXT
        return True

    def _break(self) -> bool:
        """No call after all, or one that cannot be finished: what follows is content."""
        self._malformed = True
        self._give_back()
        self._place = _Place.TEXT
        return True

    def _give_back(self) -> None:
        raw, self._raw = self._raw, ""
        if not self._started:
            self._say(raw)
        self._started = False
