"""The dashboard that is shipped: every expression names series and labels that exist, and its structure can be imported."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import msgspec
import pytest

from rackserve.api.metrics import Metrics
from rackserve.base.ids import Rank

BOARD: dict[str, Any] = msgspec.json.decode((files("rackserve.api") / "grafana.json").read_bytes())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
WORDS = {"sum", "max", "rate", "histogram_quantile", "by", "le"}


def series() -> dict[str, set[str]]:
    """Sample name -> its labels, with what Prometheus adds."""
    found: dict[str, set[str]] = {}
    for family in Metrics([Rank("prefill0")]).registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, {"instance"}).update(sample.labels)
    return found


SERIES = series()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_series_and_labels_that_exist(expression: str) -> None:
    names = re.findall(r"rackserve_\w+", expression)
    assert names and set(names) <= SERIES.keys()
    labels = set().union(*(SERIES[name] for name in names))
    selected = set(re.findall(r"(\w+)=~?\"", expression))
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    assert selected | grouped <= labels
    words = set(re.findall(r"[a-z_]{2,}", re.sub(r"rackserve_\w+|\"[^\"]*\"|\$\w+", "", expression)))
    assert words <= WORDS | labels
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_a_legend_uses_labels_that_its_expression_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = {label.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(",")}
            assert used <= kept, panel["title"]


def test_rates_are_of_counters_and_histograms_and_gauges_are_shown_as_they_are() -> None:
    kinds = {family.name: family.type for family in Metrics([Rank("prefill0")]).registry.collect()}
    for expression in EXPRESSIONS:
        for name in re.findall(r"rackserve_\w+", expression):
            family = re.sub(r"_(total|bucket|sum|count)$", "", name)
            assert (kinds.get(name) == "gauge") is (f"rate({name}" not in expression), expression
            assert family in kinds or name in kinds


def test_the_board_can_be_imported() -> None:
    assert BOARD["uid"] and BOARD["title"] and BOARD["schemaVersion"] >= 36 and "id" not in BOARD
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & own, panel["title"]
        cells |= own
    assert {variable["name"] for variable in BOARD["templating"]["list"]} == {"datasource", "instance"}
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}" and panel["fieldConfig"]["defaults"]["unit"]
        assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C", "D"][: len(panel["targets"])]


def test_everything_that_says_how_well_the_rack_does_is_on_the_board() -> None:
    shown = {name for expression in EXPRESSIONS for name in re.findall(r"rackserve_\w+", expression)}
    for name in (
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "requests_queued",
        "kv_usage_ratio",
        "step_part_seconds_total",
    ):
        assert f"rackserve_{name}" in shown
