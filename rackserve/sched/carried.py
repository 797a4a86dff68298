"""Sequences that go on by themselves: each step draws equally many tokens for all of them, so a sum says where each one is."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from rackserve.base.step import UNNAMED_TOKEN
from rackserve.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Member:
    sequence: Sequence
    since: int  # tokens drawn by everyone before it joined
    start: int  # position of its next token then


class Carried:
    """The carried sequences of one rank. Each joins with the number of tokens it may draw before it has to be planned.

    context_tokens   positions before the next ones, over all members
    """

    __slots__ = ("_drawn", "_due", "_members", "context_tokens")

    def __init__(self) -> None:
        self.context_tokens = 0
        self._drawn = 0
        self._members: dict[int, _Member] = {}
        self._due: list[tuple[int, int, int]] = []  # (tokens drawn by then, since, number)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def room(self) -> int:
        """Tokens that may be drawn until a member is due; there must be members."""
        due, members = self._due, self._members
        while True:
            when, since, number = due[0]
            member = members.get(number)
            if member is not None and member.since == since:
                return when - self._drawn
            heappop(due)  # it was removed before

    def add(self, sequence: Sequence, room: int) -> None:
        """`sequence` goes on from `sequence.scheduled` and is due after `room` >= 1 tokens."""
        self._members[sequence.number] = _Member(sequence, self._drawn, sequence.scheduled)
        self.context_tokens += sequence.scheduled
        heappush(self._due, (self._drawn + room, self._drawn, sequence.number))

    def advance(self, drawn: int) -> list[tuple[Sequence, int]]:
        """Everyone has drawn so many tokens more. Takes out those that are due, each with the tokens it has drawn here."""
        self._drawn += drawn
        self.context_tokens += drawn * len(self._members)
        due: list[tuple[Sequence, int]] = []
        if self._due and self._due[0][0] > self._drawn:
            return due
        while self._members and self.room <= 0:
            number = heappop(self._due)[2]
            due.append((self._members[number].sequence, self.remove(number)))
        return due

    def remove(self, number: int) -> int:
        """Take a member out; returns how many tokens it has drawn here."""
        member = self._members.pop(number)
        drawn = self._drawn - member.since
        self.context_tokens -= member.start + drawn
        if not self._members:
            self._due.clear()
        return drawn

    def sequences(self) -> list[Sequence]:
        """All members, in the order they joined."""
        return [member.sequence for member in self._members.values()]

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.number in self._members


def can_be_carried(sequence: Sequence) -> bool:
    """Whether all that is to come of a sequence is a number of tokens: it generates, and its request has no token ids."""
    request = sequence.request
    return len(sequence.outputs) > 0 and not request.tokens and request.logprobs < 0 and not sequence.evict_me


def room_of(sequence: Sequence, start: int, num_draft: int, block_tokens: int) -> int:
    """Tokens that may be drawn, the next at position `start`, until it ends or a step might need another block."""
    left, capacity = sequence.max_outputs - len(sequence.outputs), len(sequence.block_table) * block_tokens
    if sequence.request.num_tokens + sequence.max_outputs - 1 <= capacity:
        return left
    return min(left, capacity - num_draft - start)


def settle(sequence: Sequence, drawn: int) -> None:
    """Write down what a sequence has drawn: it has finished, or is ready to be planned. Drafts beyond its end do not count."""
    num_tokens = min(drawn, sequence.max_outputs - len(sequence.outputs))
    sequence.outputs += [UNNAMED_TOKEN] * num_tokens
    sequence.scheduled += num_tokens
    sequence.computed = sequence.scheduled
    if len(sequence.outputs) >= sequence.request.max_tokens:
        sequence.finish = "length"
    elif len(sequence.outputs) < sequence.max_outputs:
        sequence.move("ready")
