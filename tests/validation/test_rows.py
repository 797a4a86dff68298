from __future__ import annotations

import pytest

from rackserve.validation.rows import Row, Trial, largest_at, lines_of


def trial(*rows: Row) -> Trial:
    return Trial("some", "someone, 2026", "somehow", rows)


def test_errors_have_a_sign_and_figures_an_order() -> None:
    found = trial(Row("a", "s", 10.0, 8.0), Row("b", "s", 20.0, 30.0), Row("c", "s", None, 1.0)).agreement()
    assert found is not None and found.count == 2
    assert found.median_signed == pytest.approx(0.15) and found.share_low == 0.5 and found.tau == 1.0


def test_figures_of_several_units_have_no_order() -> None:
    found = trial(Row("a", "s", 1.0, 1.0), Row("b", "x", 2.0, 2.0)).agreement()
    assert found is not None and found.tau is None
    assert trial(Row("c", "s", None, 1.0)).agreement() is None


def test_every_trial_says_that_it_is_not_calibrated() -> None:
    lines = lines_of(trial(Row("a", "s", 10.0, 8.0), Row("longer", "s", None, 1.5)))
    assert "not calibrated" in lines[0] and "someone, 2026" in lines[0]
    assert "published       10  ours         8     -20%" in lines[2]
    assert lines[3].endswith("ours       1.5")
    assert "rank correlation" in lines[4]


def test_the_knee_is_where_the_bound_is_first_broken() -> None:
    assert largest_at([1, 2, 3, 4], [0.1, 0.2, 9.0, 0.3], 1.0) == 2
    assert largest_at([1, 2], [0.1, 0.2], 1.0) == 2
    assert largest_at([1, 2], [5.0, 0.2], 1.0) == 0
