"""What is booked on each rank, under (request, attempt), so that what is booked is released exactly once.

For prefill ranks the unit is tokens of work still to do (`Candidate.own_tokens`); for decode ranks it is context tokens.
"""

from __future__ import annotations

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Attempt, Rank


class LoadBook:
    """Bookings of one role's ranks. A rank without bookings leaves no trace."""

    __slots__ = ("_bookings", "_totals")

    def __init__(self) -> None:
        self._bookings: dict[Rank, dict[Attempt, int]] = {}
        self._totals: dict[Rank, int] = {}

    def book(self, rank: Rank, attempt: Attempt, tokens: int) -> None:
        """Charge `tokens` (>= 0) to `rank`. Raises InvariantError if the attempt is booked there already."""
        bookings = self._bookings.setdefault(rank, {})
        if attempt in bookings:
            raise InvariantError(f"{attempt} is already booked on {rank}")
        bookings[attempt] = 0
        self._totals.setdefault(rank, 0)
        self.adjust(rank, attempt, tokens)

    def adjust(self, rank: Rank, attempt: Attempt, tokens: int) -> bool:
        """Put a booking right: `tokens` (>= 0) are outstanding now. False if nothing is booked (a late message)."""
        booked = self._bookings.get(rank, {}).get(attempt)
        if booked is None:
            return False
        if tokens < 0:
            raise InvariantError(f"{tokens} tokens outstanding for {attempt} on {rank}")
        self._bookings[rank][attempt] = tokens
        self._totals[rank] += tokens - booked
        return True

    def progress(self, rank: Rank, attempt: Attempt, tokens_done: int) -> bool:
        """`tokens_done` more tokens are done; a booking never falls below 0. False if nothing is booked."""
        booked = self._bookings.get(rank, {}).get(attempt, 0)
        return self.adjust(rank, attempt, max(booked - tokens_done, 0))

    def release(self, rank: Rank, attempt: Attempt) -> bool:
        """End a booking; False if there is none (any more)."""
        bookings = self._bookings.get(rank, {})
        booked = bookings.pop(attempt, None)
        if booked is None:
            return False
        self._totals[rank] -= booked
        if not bookings:
            del self._bookings[rank], self._totals[rank]
        return True

    def outstanding(self, rank: Rank) -> int:
        """Tokens booked on `rank`."""
        return self._totals.get(rank, 0)

    def booked(self, rank: Rank) -> tuple[int, int]:
        """Tokens and attempts booked on `rank`."""
        bookings = self._bookings.get(rank)
        return (0, 0) if bookings is None else (self._totals[rank], len(bookings))

    def attempts(self, rank: Rank) -> list[Attempt]:
        """Attempts booked on `rank` in the order they were booked."""
        return list(self._bookings.get(rank, ()))

    def is_idle(self) -> bool:
        """Whether nothing is booked anywhere."""
        return not self._bookings

    def check(self) -> None:
        """Raise InvariantError unless each total is the sum of its bookings."""
        sums = {rank: sum(bookings.values()) for rank, bookings in self._bookings.items()}
        if sums != self._totals or not all(self._bookings.values()):
            raise InvariantError(f"booked {sums}, counted {self._totals}")
