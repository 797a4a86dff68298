from __future__ import annotations

import json
from pathlib import Path

import pytest

from rackserve.base.errors import ConfigError
from rackserve.validation.cache_policies import ARRANGEMENTS, CacheCell, CacheRow
from rackserve.validation.cache_table import COMPARED, REFERENCE, cache_table, table_lines, verdict


def row(lanes: int, share: float, **hits: float) -> CacheRow:
    rates = dict(zip(COMPARED, REFERENCE[lanes, share], strict=True)) | hits
    return CacheRow(lanes, share, 100, tuple(CacheCell(name, rates.get(name, 0.5), 1.5) for name in ARRANGEMENTS))


def test_the_reference_agrees_with_itself() -> None:
    found = verdict([row(*point) for point in REFERENCE])
    assert min(found.orders) == 1.0 and found.largest == 0.0
    assert found.knee_gain == pytest.approx(0.4)


def test_an_order_that_turns_shows() -> None:
    found = verdict([row(400, 1.0, pool=0.9)])
    assert found.orders[0] == pytest.approx(1 / 3)  # two of its six pairs turned
    assert found.largest == pytest.approx(5.9) and found.knee_gain is None


def test_lines_have_both_hit_rates_and_the_busiest_rank() -> None:
    text = "\n".join(table_lines([row(400, 1.0, pool=0.95)]))
    assert "0.950 (0.959) x 1.50" in text and "largest difference 0.9 points" in text


def weka(path: Path, num_requests: int) -> Path:
    """Prompts that grow by a block every 20 seconds."""
    requests = [
        {"t": 20.0 * turn, "type": "n", "in": 64 * (turn + 1), "out": 5, "api_time": 2.0, "hash_ids": list(range(turn + 1))}
        for turn in range(num_requests)
    ]
    path.write_text(json.dumps({"id": "one", "block_size": 64, "requests": requests}))
    return path


def test_rows_come_in_the_order_of_the_grid(tmp_path: Path) -> None:
    rows = cache_table(weka(tmp_path / "sessions.json", 25), [(1, 0.5), (1, 1.0)])
    assert [(found.lanes, found.share) for found in rows] == [(1, 0.5), (1, 1.0)]
    assert {cell.arrangement for cell in rows[0].cells} == set(ARRANGEMENTS)
    assert all(cell.hit_rate > 0.8 for cell in rows[1].cells if cell.arrangement != "round robin")


def test_a_trace_of_short_sessions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="20 requests"):
        cache_table(weka(tmp_path / "sessions.json", 5), [(1, 1.0)])
