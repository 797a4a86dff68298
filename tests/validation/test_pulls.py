from __future__ import annotations

import pytest

from rackserve.validation.pulls import LENGTHS, document_trial, length_trials, offered, prefix_trials


def test_pulling_is_shorter_at_every_length_that_was_measured() -> None:
    computed, pulled, compared = length_trials()
    assert all(row.ours > 1 for row in compared.rows) and len(compared.rows) == len(LENGTHS)
    for trial in (computed, pulled):
        found = trial.agreement()
        assert found is not None and found.tau == 1.0


def test_computing_grows_faster_than_length_and_pulling_as_fast() -> None:
    computed, pulled, _ = ([row.ours for row in trial.rows] for trial in length_trials())
    assert computed[-1] / computed[1] > LENGTHS[-1] / LENGTHS[1] > pulled[-1] / pulled[1]


def test_questions_come_at_their_rate() -> None:
    assert len(list(offered(8.0, 100.0))) == pytest.approx(800, rel=0.1)


def test_pulling_serves_more_of_shared_prefixes() -> None:
    waits, served = prefix_trials((8.0,), 20.0)
    without, pulled = (row.ours for row in waits.rows)
    assert pulled < without
    assert served.rows[2].ours >= 1


def test_documents_are_asked_about_in_all_turns() -> None:
    trial = document_trial(num_documents=16, active=8)
    assert all(row.ours > 0 for row in trial.rows)
    assert trial.rows[2].published == 1.35
