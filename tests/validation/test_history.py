from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rackserve.base.errors import FileFormatError
from rackserve.validation.agreement import Agreement
from rackserve.validation.history import append, drift, entries, figures, revision


def test_figures_are_named_by_the_texts_beside_them() -> None:
    found = figures(
        {"version": "1", "rows": [{"what": "a", "ours": 1}, {"what": "b", "ours": 2.5, "flag": True}], "plain": [3]}
    )
    assert found == {"rows / a / ours": 1.0, "rows / b / ours": 2.5, "plain / 0": 3.0}


def test_items_with_equal_texts_keep_their_places() -> None:
    assert figures([{"what": "a", "x": 1}, {"what": "a", "x": 2}]) == {"a 0 / x": 1.0, "a 1 / x": 2.0}


def test_only_what_was_found_before_can_drift_and_the_newest_line_counts() -> None:
    before = {"date": "2026-01-02", "revision": "abc", "old": 1.0, "same": 2.0, "moved": 10.0, "more": 1.0}
    found = drift([{"more": 9.0, "same": 7.0}, before], {"same": 2.0 + 1e-9, "moved": 11.0, "more": 3.0, "new": 5.0})
    assert found.since == "2026-01-02 abc" and found.num_same == 1
    assert [(change.name, change.before, change.now) for change in found.changes] == [("more", 1.0, 3.0), ("moved", 10.0, 11.0)]


def test_lines_come_back_in_the_order_in_which_they_were_appended(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert entries(path) == []
    for count in (1, 2):
        append(path, Agreement(count, 0.5, 0.5, 1.0, None))
    lines = entries(path)
    assert [line["count"] for line in lines] == [1, 2]
    assert drift(lines, msgspec.to_builtins(Agreement(2, 0.5, 0.25, 1.0, None))).changes[0].name == "median_signed"


def test_a_figure_may_be_older_than_the_last_line() -> None:
    found = drift([{"a": 1.0}, {"b": 2.0}], {"a": 1.5, "b": 2.0})
    assert [change.name for change in found.changes] == ["a"] and found.num_same == 1


def test_what_is_no_history_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(FileFormatError, match=r"other\.jsonl"):
        entries(path)
    with pytest.raises(FileFormatError, match="--history"):
        append(tmp_path, Agreement(1, 0.0, 0.0, 0.0, None))


def test_a_revision_is_a_commit_or_nothing() -> None:
    assert revision() == "" or len(revision().removesuffix("-dirty")) >= 10
