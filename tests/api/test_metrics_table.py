from __future__ import annotations

from pathlib import Path

from rackserve.api.metrics_table import table

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_the_page_has_this_very_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "put there what `python -m rackserve.api.metrics_table` prints"


def test_counters_are_named_as_they_are_scraped() -> None:
    assert "| `requests_total` | counter | outcome |" in table()
    assert "| `kv_blocks` | gauge | holder, state |" in table()
