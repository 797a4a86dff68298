"""What `make conformance` counts as well, and the model that leads agents through a tool call."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

pytest.importorskip("torch")

from conformance.cases import Case, Outcome, Pins, Site, Suite, judge
from conformance.homes import home_of
from conformance.scripted_model import CALL_END, SPELLING, pieces, scripts
from conformance.suites import SUITES


def _suite(**differences: str) -> Suite:
    def run(site: Site) -> list[Case]:
        raise NotImplementedError

    return Suite("s", "", run, differences=differences)


def test_only_a_named_difference_may_fail() -> None:
    named, other = judge(_suite(a="why"), [Case("a", "failed", "x"), Case("b", "failed", "y")])
    assert named == Case("a", "differs", "why") and other == Case("b", "failed", "y")
    assert Outcome("s", "", (named,)).is_well and not Outcome("s", "", (named, other)).is_well


def test_a_difference_that_is_none_any_more_or_was_not_tried_fails() -> None:
    (passed,) = judge(_suite(a="why"), [Case("a", "passed")])
    (missing,) = judge(_suite(a="why"), [])
    assert passed.status == missing.status == "failed"


def test_what_was_skipped_or_broke_off_is_not_passed() -> None:
    skipped = Outcome("s", "", (Case("a", "skipped", "why"),))
    assert skipped.count("passed") == 0 and not Outcome("s", "", error="x").is_well


def test_every_package_is_pinned_and_other_pins_live_elsewhere() -> None:
    for suite in SUITES:
        pattern = r"[\w.\[\]-]+==[\d.]+" if suite.pins.packager == "pip" else r"@?[\w/-]+@[\d.]+"
        assert all(re.fullmatch(pattern, package) for package in suite.pins.packages), suite.name
    assert len({suite.name for suite in SUITES}) == len(SUITES)
    assert home_of("s", Pins("pip", ("a==1",))) != home_of("s", Pins("pip", ("a==2",)))


def test_each_piece_of_the_scripts_is_followed_by_one_other() -> None:
    used: set[str] = set()
    follows: dict[str, str] = {}
    for start, text in scripts().items():
        said = pieces(text, used)
        assert "".join(said) == text.translate(SPELLING)
        for piece, successor in pairwise([start, *said, "the end"]):
            assert follows.setdefault(piece, successor) == successor
    assert follows[CALL_END.translate(SPELLING)] == "the end"
