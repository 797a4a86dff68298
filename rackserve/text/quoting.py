"""What clients write stays text: tokens spelt in it are marked before a template runs, and known from its own after."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """Part of a prompt. `ours`: the template wrote it, so special tokens in it count; else it came from the client."""

    text: str
    ours: bool


_SIGNS = range(0xE000, 0xF900)
"""Code points that stand for no character; one that nobody used goes before and behind each token that a client spelt."""


class Quoting:
    """The added tokens of one vocabulary, looked for in what clients write. No state: may be used from several threads.

    spellings  each token as it is written, and whether it is special: stands for no text, and is never part of an answer
    """

    __slots__ = ("_all", "_special", "_starts")

    def __init__(self, spellings: Mapping[str, bool]) -> None:
        self._all = any_of(spellings)
        self._starts = {text[:4] for text in spellings if text}  # few, however many tokens there are
        self._special = any_of([text for text, special in spellings.items() if special])

    def mark(self, value: Any, sign: str, *, answer: bool = False) -> Any:
        """`value`, strings in it with `sign` around each token. Of an `answer`, which models write, special tokens only."""
        pattern = self._special if answer else self._all
        if pattern is None:
            return value
        marked = rf"{sign}\g<0>{sign}"
        return _mapped(value, lambda text: pattern.sub(marked, text) if self._may_spell(text) else text)

    def spelt(self, value: Any) -> bool:
        """Whether a token is spelt anywhere in `value`."""
        pattern = self._all
        return pattern is not None and any(self._may_spell(text) and pattern.search(text) for text in _texts(value))

    def _may_spell(self, text: str) -> bool:
        """Far quicker than looking for the tokens themselves, and mostly false."""
        return any(start in text for start in self._starts)

    def followed(self, prompt: tuple[Piece, ...], begun: str) -> tuple[Piece, ...]:
        """A `prompt`, and behind it the beginning of an answer, which a client sent."""
        *before, last = prompt
        if not begun:
            return prompt
        if last.ours and (self._special is None or not self._special.search(begun)):
            return (*before, Piece(last.text + begun, True))
        return (*prompt, Piece(begun, False))

    def pieces(self, text: str, sign: str) -> tuple[Piece, ...]:
        """A prompt in which tokens of clients are marked, without the signs: pieces of the template's and of clients'."""
        if self._all is None:
            return (Piece(text, True),)
        pieces: list[Piece] = []
        at = 0
        for found in re.finditer(f"{sign}({self._all.pattern}){sign}", text):
            pieces += [Piece(text[at : found.start()].replace(sign, ""), True), Piece(found[1], False)]
            at = found.end()
        pieces.append(Piece(text[at:].replace(sign, ""), True))
        return tuple(piece for piece in pieces if piece.text) or (Piece("", True),)


def unused_sign(values: Any) -> str:
    """A sign that is in none of the strings in `values`."""
    used = set().union(*(set(text) for text in _texts(values)))
    return next(chr(code) for code in _SIGNS if chr(code) not in used)


def any_of(spellings: Mapping[str, bool] | list[str]) -> re.Pattern[str] | None:
    """What finds any of them, at each place the longest; None if there are none."""
    ordered = sorted((text for text in spellings if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, each in value.items() for text in (key, *_texts(each))]
    return [text for each in value for text in _texts(each)] if isinstance(value, list) else []


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list) else value
