from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.text.stops import StopFinder


def run(stops: tuple[str, ...], parts: list[str]) -> tuple[str, bool]:
    finder = StopFinder(stops)
    shown = "".join(finder.feed(part) for part in parts) + finder.flush()
    return shown, finder.stopped


def expected(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    starts = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(starts)], True) if starts else (text, False)


def cuts(text: str) -> list[list[str]]:
    places = range(1, len(text))
    chosen = itertools.chain.from_iterable(itertools.combinations(places, count) for count in range(len(text)))
    return [[text[a:b] for a, b in itertools.pairwise([0, *places_, len(text)])] for places_ in chosen]


@pytest.mark.parametrize("stops", [("DEFGHIJ",), ("DEFG", "EF"), ("EF", "DEFG"), ("EFX", "GH"), ("K",), ("DEFGX", "EF")])
def test_a_stop_string_over_any_cut_hides_itself_and_all_after(stops: tuple[str, ...]) -> None:
    for parts in cuts("ABCDEFGHIJK"):
        assert run(stops, parts) == expected(stops, "ABCDEFGHIJK")


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_what_is_shown_is_the_text_before_the_earliest_match(stops: list[str], parts: list[str]) -> None:
    assert run(tuple(stops), parts) == expected(tuple(stops), "".join(parts))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text("ab", min_size=1, max_size=4), st.lists(st.text("abc", min_size=1, max_size=3), max_size=8))
def test_text_is_let_go_as_soon_as_it_cannot_become_a_stop(stop: str, parts: list[str]) -> None:
    finder = StopFinder((stop,))
    seen = shown = ""
    for part in parts:
        seen += part
        shown += finder.feed(part)
        if not finder.stopped:
            held = max(size for size in range(len(stop)) if seen.endswith(stop[:size]))
            assert shown == seen[: len(seen) - held]


def test_without_stop_strings_text_passes_at_once() -> None:
    assert not StopFinder(()).wanted and StopFinder(("a",)).wanted
    finder = StopFinder(())
    assert (finder.feed("abc"), finder.flush(), finder.stopped) == ("abc", "", False)


def test_nothing_comes_out_after_a_stop() -> None:
    finder = StopFinder(("x",))
    assert [finder.feed("axb"), finder.feed("c"), finder.flush()] == ["a", "", ""]
