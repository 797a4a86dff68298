"""Where a JSON value ends in a text that is still growing, and the first character at which it cannot be one."""

from __future__ import annotations

import re
from enum import Enum

MAX_DEPTH = 200
"""Nesting; what is deeper counts as broken, for readers recurse."""


class Scan(Enum):
    """What is known of the value."""

    MORE = "all text so far is its beginning"
    DONE = "it is complete"
    BROKEN = "the next character does not belong to any value"


class _Expect(Enum):
    VALUE = "a value"
    ITEM = "a value, or the end of an empty array"
    FIRST_KEY = "a key, or the end of an empty object"
    KEY = "a key"
    COLON = "a colon"
    NEXT = "a comma or the end of what is open"
    STRING = "more of a string"
    ESCAPE = "what is escaped"
    SCALAR = "more of a number or a word"


_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]*")
_WHOLE_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null", re.ASCII)
_MAX_SCALAR = 400
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Follows one value, which must begin with the first character given. Its text is never changed or kept.

    A number or word on its own ends at the first character that cannot go on with it.
    """

    __slots__ = ("_escape", "_expect", "_is_key", "_open", "_scalar")

    def __init__(self) -> None:
        self._expect = _Expect.VALUE
        self._open: list[str] = []  # what closes each open object and array
        self._is_key = False  # the string being read is a key
        self._escape = ""  # of an escape, after the backslash
        self._scalar = ""

    def scan(self, text: str, start: int = 0) -> tuple[int, Scan]:
        """Go on with `text` from `start`: the end of what belongs to the value, and what is known then."""
        place = start
        while place < len(text):
            if self._expect is _Expect.STRING:
                found = _PLAIN.match(text, place)
                place = found.end() if found else place
            elif self._expect is _Expect.SCALAR:
                found = _SCALAR.match(text, place)
                end = found.end() if found else place
                self._scalar += text[place:end]
                place = end
                if len(self._scalar) > _MAX_SCALAR or (place < len(text) and not _WHOLE_SCALAR.fullmatch(self._scalar)):
                    return place, Scan.BROKEN
            elif self._expect is not _Expect.ESCAPE and (self._open or self._expect is not _Expect.VALUE):
                found = _SPACE.match(text, place)
                place = found.end() if found else place
            if place == len(text):
                break
            if self._expect is _Expect.SCALAR:
                self._expect = _Expect.NEXT
                if not self._open:
                    return place, Scan.DONE
                continue
            if not self._take(text[place]):
                return place, Scan.BROKEN
            place += 1
            if not self._open and self._expect is _Expect.NEXT:
                return place, Scan.DONE
        return place, Scan.MORE

    def _take(self, character: str) -> bool:
        """Take one character; False if it does not fit."""
        expect = self._expect
        if expect is _Expect.STRING:
            return self._in_string(character)
        if expect is _Expect.ESCAPE:
            return self._in_escape(character)
        if expect is _Expect.COLON:
            self._expect = _Expect.VALUE
            return character == ":"
        if expect is _Expect.NEXT:
            if character == ",":
                self._expect = _Expect.KEY if self._open[-1] == "}" else _Expect.VALUE
                return True
            return self._close(character)
        if expect in (_Expect.KEY, _Expect.FIRST_KEY):
            if character == '"':
                self._expect, self._is_key = _Expect.STRING, True
                return True
            return expect is _Expect.FIRST_KEY and self._close(character)
        return self._begin(character) or (expect is _Expect.ITEM and self._close(character))

    def _begin(self, character: str) -> bool:
        """A value begins."""
        if character == '"':
            self._expect, self._is_key = _Expect.STRING, False
        elif character in "{[":
            self._open.append("}" if character == "{" else "]")
            self._expect = _Expect.FIRST_KEY if character == "{" else _Expect.ITEM
            return len(self._open) <= MAX_DEPTH
        elif character in "-0123456789tfn":
            self._expect, self._scalar = _Expect.SCALAR, character
        else:
            return False
        return True

    def _close(self, character: str) -> bool:
        if character != self._open[-1]:
            return False
        self._open.pop()
        self._expect = _Expect.NEXT
        return True

    def _in_string(self, character: str) -> bool:
        if character == '"':
            self._expect = _Expect.COLON if self._is_key else _Expect.NEXT
        elif character == "\\":
            self._expect, self._escape = _Expect.ESCAPE, ""
        else:  # a control character
            return False
        return True

    def _in_escape(self, character: str) -> bool:
        self._escape += character
        if self._escape[0] == "u":
            if len(self._escape) > 1 and character not in _HEX:
                return False
            if len(self._escape) == 5:
                self._expect = _Expect.STRING
            return True
        self._expect = _Expect.STRING
        return character in '"\\/bfnrt'
