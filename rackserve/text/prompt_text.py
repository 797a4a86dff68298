"""Prompts as bytes that tell what the template wrote from what clients did, and from where a later prompt may be written on."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from rackserve.base.errors import RequestError
from rackserve.text.quoting import Piece


class PromptText(NamedTuple):
    """A prompt in UTF-8. `marks`: 2 * end + ours of each of its pieces, ends in bytes."""

    raw: bytes
    marks: array[int]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> PromptText:
        """The pieces joined. Raises RequestError for code points that are not text (lone surrogates)."""
        parts: list[bytes] = []
        marks, end = array("q"), 0
        for piece in pieces:
            parts.append(utf8(piece.text))
            end += len(parts[-1])
            marks.append(2 * end + piece.ours)
        return cls(b"".join(parts), marks)

    @classmethod
    def whole(cls, text: str) -> PromptText:
        """`text` as one piece, of the template. Raises RequestError as `of`."""
        raw = utf8(text)
        return cls(raw, array("q", [2 * len(raw) + 1]))

    def end(self, piece: int) -> int:
        """Bytes before the end of a piece; those of piece -1 are none."""
        return self.marks[piece] >> 1 if piece >= 0 else 0

    def pieces(self, start: int = 0) -> tuple[Piece, ...]:
        """The pieces from byte `start`, which is no place within a character, on; the first may be the rest of one."""
        first = bisect_right(self.marks, 2 * start + 1)
        pieces = []
        for mark in self.marks[first:]:
            pieces.append(Piece(self.raw[start : mark >> 1].decode(), bool(mark & 1)))
            start = mark >> 1
        return tuple(pieces)

    def followed(self, other: PromptText) -> PromptText:
        """This text and behind it the `other`."""
        before = 2 * len(self.raw)
        return PromptText(self.raw + other.raw, self.marks + array("q", [before + mark for mark in other.marks]))

    def common(self, other: PromptText) -> int:
        """Bytes at the beginning in which text and pieces agree; of the first piece that does not, if it is of one kind."""
        same = common_prefix(self.raw, other.raw)
        piece = common_prefix(self.marks.tobytes(), other.marks.tobytes()) // self.marks.itemsize
        if piece in (len(self.marks), len(other.marks)) or (self.marks[piece] ^ other.marks[piece]) & 1:
            return min(same, self.end(piece - 1))
        return min(same, self.end(piece), other.end(piece))


class Made(NamedTuple):
    """Calls made in a conversation so far. `places`: of the latest answer's calls, by id; `ids`: of all there were."""

    places: dict[str, int]
    ids: frozenset[str]


class Stem(NamedTuple):
    """A beginning of a prompt that stays as it is whatever messages follow.

    asked         the options, its messages and the first one behind it, written so that nothing else is written alike
    num_messages  messages in it
    num_turns     turns in it
    num_pieces    finished pieces of the prompt's text in it
    markup        what the template wrote behind these
    made          calls made in it
    offers        a turn in it offers tools
    drop          reasoning is left out of its answers
    """

    asked: bytes
    num_messages: int
    num_turns: int
    num_pieces: int
    markup: str
    made: Made
    offers: bool
    drop: bool

    @property
    def num_bytes(self) -> int:
        """What keeping it takes, about."""
        return len(self.asked) + len(self.markup) + 200 * len(self.made.ids) + 500


class Written(NamedTuple):
    """A prompt's text, and its `stem` where a later prompt can be written on from one."""

    text: PromptText
    stem: Stem | None = None


def common_prefix(a: bytes, b: bytes) -> int:
    """How many bytes `a` and `b` have in common at their beginning."""
    low, high = 0, min(len(a), len(b))
    view = memoryview(b)
    if a.startswith(view[:high]):
        return high
    while high - low > 1:  # the first `low` agree, and what is between `low` and `high` does not
        middle = (low + high) // 2
        if a.startswith(view[low:middle], low):
            low = middle
        else:
            high = middle
    return low


def utf8(text: str) -> bytes:
    """The bytes of `text`. Raises RequestError for code points that are not text (lone surrogates)."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("the text holds characters that are not valid Unicode") from error
