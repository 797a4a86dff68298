"""The load book against a naive dictionary of bookings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.base.ids import Attempt, Rank
from rackserve.route.load import LoadBook

RANKS = (Rank("prefill0"), Rank("prefill0", 1), Rank("prefill1"))
ACTIONS = st.tuples(
    st.sampled_from(["book", "book", "adjust", "progress", "release"]),
    st.sampled_from(RANKS),
    st.tuples(st.sampled_from("ab"), st.integers(1, 2)),
    st.integers(0, 50),
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_totals_are_the_sums_of_the_bookings_after_every_operation(actions: list[tuple[str, Rank, Attempt, int]]) -> None:
    book = LoadBook()
    naive: dict[tuple[Rank, Attempt], int] = {}
    for kind, rank, attempt, tokens in actions:
        booked = (rank, attempt) in naive
        if kind == "book" and not booked:
            book.book(rank, attempt, tokens)
            naive[rank, attempt] = tokens
        elif kind == "adjust":
            assert book.adjust(rank, attempt, tokens) == booked
            if booked:
                naive[rank, attempt] = tokens
        elif kind == "progress":
            assert book.progress(rank, attempt, tokens) == booked
            if booked:
                naive[rank, attempt] = max(naive[rank, attempt] - tokens, 0)
        elif kind == "release":
            assert book.release(rank, attempt) == booked
            naive.pop((rank, attempt), None)
        book.check()
        for each in RANKS:
            mine = {a: value for (r, a), value in naive.items() if r == each}
            assert book.booked(each) == (book.outstanding(each), len(mine)) == (sum(mine.values()), len(mine))
            assert book.attempts(each) == list(mine)
        assert book.is_idle() == (not naive)


def test_one_attempt_cannot_be_booked_twice_on_a_rank() -> None:
    book = LoadBook()
    book.book(RANKS[0], ("a", 1), 5)
    with pytest.raises(InvariantError, match="already booked"):
        book.book(RANKS[0], ("a", 1), 5)
    book.book(RANKS[0], ("a", 2), 5)
    assert book.outstanding(RANKS[0]) == 10


def test_negative_work_is_refused() -> None:
    book = LoadBook()
    book.book(RANKS[0], ("a", 1), 5)
    with pytest.raises(InvariantError, match="-1 tokens"):
        book.adjust(RANKS[0], ("a", 1), -1)
