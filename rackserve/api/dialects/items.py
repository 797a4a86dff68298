"""An answer as a list of items that grow: reasoning, text, tool calls. What all dialects but the plainest write from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from rackserve.api.answer import Delta, TokenEntry
from rackserve.text.dsml_parser import (
    ArgumentsDelta,
    CallFinished,
    CallStarted,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
)

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Item:
    """`text`: of reasoning and text; of a call its arguments. `whole`: nothing of it is missing."""

    kind: Kind
    text: str = ""
    name: str = ""
    whole: bool = False
    entries: tuple[TokenEntry, ...] = ()


@dataclass(slots=True, frozen=True)
class Change:
    """One thing that happened to item number `index`. `begins`: it is new, and `text` is empty."""

    index: int
    item: Item
    text: str = ""
    begins: bool = False
    ends: bool = False


class ItemList:
    """The items of one choice. Neighbouring pieces of a kind are one item; a call is one item.

    A finished call ends where it ends; reasoning and text end when something else begins or the answer does, and with it ends
    whatever was cut off. All log-probabilities stand with the first text: which tokens made which item is not known.
    """

    __slots__ = ("_calls", "_early", "_open", "_text", "items")

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: int | None = None  # the reasoning or text that still grows
        self._text: int | None = None  # the first text
        self._early: tuple[TokenEntry, ...] = ()  # log-probabilities that came before it
        self._calls: dict[int, int] = {}  # number of a call -> its item

    def feed(self, delta: Delta) -> Iterator[Change]:
        """What `delta` changes, in order."""
        if self._text is None:
            self._early += delta.entries
        else:
            self.items[self._text].entries += delta.entries
        for part in delta.parts:
            yield from self._part(part)
        if delta.ending is not None:
            yield from self._close(whole=delta.ending.finish == "stop")
            for index in self._calls.values():
                yield Change(index, self.items[index], ends=True)

    def _part(self, part: OutputDelta) -> Iterator[Change]:
        match part:
            case ReasoningDelta(text):
                yield from self._grow("reasoning", text)
            case ContentDelta(text):
                yield from self._grow("text", text)
            case CallStarted(number, name):
                yield from self._close(whole=True)
                self._calls[number] = len(self.items)
                yield self._begin(Item("call", name=name))
            case ArgumentsDelta(number, text):
                index = self._calls[number]
                self.items[index].text += text
                yield Change(index, self.items[index], text)
            case CallFinished(number):
                index = self._calls.pop(number)
                self.items[index].whole = True
                yield Change(index, self.items[index], ends=True)

    def _begin(self, item: Item) -> Change:
        self.items.append(item)
        return Change(len(self.items) - 1, item, begins=True)

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self.items[self._open].kind != kind:
            yield from self._close(whole=True)
            self._open = len(self.items)
            if kind == "text" and self._text is None:
                self._text = self._open
                yield self._begin(Item(kind, entries=self._early))
            else:
                yield self._begin(Item(kind))
        if text:
            item = self.items[self._open]
            item.text += text
            yield Change(self._open, item, text)

    def _close(self, *, whole: bool) -> Iterator[Change]:
        if self._open is not None:
            item = self.items[self._open]
            item.whole = whole
            yield Change(self._open, item, ends=True)
            self._open = None


def items_of(deltas: Iterable[Delta]) -> list[Item]:
    """The items of a whole choice."""
    items = ItemList()
    for delta in deltas:
        for _ in items.feed(delta):
            pass
    return items.items


def call_id(answer: str, number: int) -> str:
    """The id under which a client sends the result of call or item `number` of the answer named `answer`."""
    return f"call_{answer.rpartition('_')[2].rpartition('-')[2]}{number}"
