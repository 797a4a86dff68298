from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import RequestError
from rackserve.text.prompt_text import PromptText, common_prefix, utf8
from rackserve.text.quoting import Piece

_pieces = st.lists(st.builds(Piece, st.text("aé", min_size=1, max_size=3), st.booleans()), max_size=4)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(_pieces, _pieces)
def test_a_text_gives_its_pieces_back_and_follows_another(pieces: list[Piece], more: list[Piece]) -> None:
    text = PromptText.of(pieces)
    assert text.pieces() == tuple(pieces)
    assert text.followed(PromptText.of(more)) == PromptText.of([*pieces, *more])
    for place in range(len(pieces) + 1):
        assert text.pieces(text.end(place - 1)) == tuple(pieces[place:])


def test_pieces_from_within_one_begin_with_its_rest() -> None:
    text = PromptText.of([Piece("ab", True), Piece("cd", False)])
    assert text.pieces(1) == (Piece("b", True), Piece("cd", False)) and text.pieces(3) == (Piece("d", False),)
    assert PromptText.whole("ab") == PromptText.of([Piece("ab", True)])


@settings(derandomize=True, max_examples=300, deadline=None)
@given(_pieces, _pieces, _pieces)
def test_what_texts_have_in_common_is_written_alike_by_the_same(
    same: list[Piece], one: list[Piece], other: list[Piece]
) -> None:
    def kinds(pieces: list[Piece]) -> list[tuple[int, bool]]:
        return [(byte, piece.ours) for piece in pieces for byte in piece.text.encode()]

    first, second = kinds(same + one), kinds(same + other)
    alike = next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    shared = PromptText.of(same + one).common(PromptText.of(same + other))
    assert len(kinds(same)) <= shared <= alike


def test_what_is_not_text_is_refused() -> None:
    for call in (lambda: utf8("\ud800"), lambda: PromptText.of([Piece("\ud800", False)])):
        with pytest.raises(RequestError, match="Unicode"):
            call()


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.binary(max_size=6), st.binary(max_size=6), st.binary(max_size=6))
def test_common_prefix_is_the_first_difference(same: bytes, a: bytes, b: bytes) -> None:
    a, b = same + a, same + b
    naive = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, b) == naive
