from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import rackserve.reproduction
from rackserve.reproduction.figures import published
from rackserve.reproduction.predictions import Prediction, predict
from rackserve.reproduction.table import REASONS, amount, document, markdown, rows_of, score_of
from tests.reproduction.runs import RUNS


def test_perturbing_the_published_table_changes_no_prediction() -> None:
    figures = published()
    shaken = {name: msgspec.structs.replace(figure, value=3 * figure.value + 1) for name, figure in figures.items()}
    ours = {row.name: row.prediction for row in rows_of(figures, predict(RUNS)) if row.label != "input"}
    again = {row.name: row.prediction for row in rows_of(shaken, predict(RUNS)) if row.label != "input"}
    assert ours == again and len(ours) > 20


def test_only_the_table_and_its_command_read_published_figures() -> None:
    package = Path(rackserve.__file__).parent
    readers = {path.name for path in package.rglob("*.py") if "reproduction.figures" in path.read_text(encoding="utf-8")}
    assert readers == {"table.py", "reproduce.py"}


def test_inputs_and_fitted_rows_do_not_count() -> None:
    rows = rows_of(published(), predict(RUNS))
    score = score_of(rows)
    assert score.num_predicted == sum(figure.role == "held-out" for figure in published().values()) >= 8
    assert score.num_near <= score.num_simulated <= score.num_predicted
    assert {row.label for row in rows if row.figure.role == "fitted"} == {"fitted"}


def test_an_error_is_relative_and_fifteen_percent_are_near() -> None:
    figure = published()["pool-hit"]
    near, far = (
        rows_of({"pool-hit": figure}, {"pool-hit": Prediction(factor * figure.value, "simulated")})[0]
        for factor in (1.149, 0.849)
    )
    assert near.error == pytest.approx(0.149) and near.near
    assert far.error == pytest.approx(-0.151) and not far.near


def test_a_band_holds_what_lies_between_its_ends() -> None:
    figure = published()["gb300-387"]
    row = rows_of({"a": figure}, {"a": Prediction(1e5, "simulated", low=1e4, high=2e5)})[0]
    assert row.within_band and not row.near and score_of([row]).num_within_band == 1
    above = rows_of({"a": figure}, {"a": Prediction(1e5, "simulated", low=9e4)})[0]
    below = rows_of({"a": figure}, {"a": Prediction(1e5, "simulated", low=1e4)})[0]
    assert below.within_band and not above.within_band  # a band without an upper end


def test_every_figure_assumption_and_miss_is_printed() -> None:
    text = markdown(rows_of(published(), predict({})), {}, "head")
    for figure in published().values():
        assert f"| {figure.what} |" in text
    assert "## Assumptions" in text and "None was run." in text
    assert "- Without a value, as their set-ups were not run: 15." in text and "- 3 x DEP2" not in text
    full = markdown(rows_of(published(), predict(RUNS)), RUNS, "head")
    assert "| three-pool | 1,000 |" in full and "1 % of step time moves it by" in full


def test_reasons_are_given_for_held_out_figures_alone() -> None:
    assert {published()[name].role for name in REASONS} == {"held-out"}


def test_the_document_is_json_with_all_rows() -> None:
    content = json.loads(document(rows_of(published(), predict(RUNS)), RUNS, "head"))
    assert len(content["rows"]) == len(published()) and content["runs"].keys() == RUNS.keys()


def test_amounts_have_the_digits_that_count() -> None:
    assert [amount(value) for value in (None, 2.52e6, 29_300, 1_810, 10.49, -6.79)] == [
        "-",
        "2.52M",
        "29K",
        "1,810",
        "10.5",
        "-6.79",
    ]


def test_a_wait_that_is_not_claimed_does_not_count_however_near() -> None:
    figure = published()["pool-ttft"]
    row = rows_of({"a": figure}, {"a": Prediction(figure.value, "simulated", low=0.0, claimed=False)})[0]
    score = score_of([row])
    assert row.error == 0 and not row.near
    assert (score.num_near, score.num_within_band, score.num_unclaimed) == (0, 0, 1)
    assert "| simulated, not claimed |" in markdown([row], {}, "head")
