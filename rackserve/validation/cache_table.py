"""The table of hit rates by cache size and placement over recorded agent sessions, beside another program's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.bench.trace import read_sessions
from rackserve.validation.agreement import kendall_tau
from rackserve.validation.cache_policies import (
    ARRANGEMENTS,
    LANE_TOKENS,
    RANKS,
    CacheCell,
    CacheRow,
    CacheSetup,
    compare_caches,
)

SOURCE = "another program over 504 sessions of the kv-cache-tester corpus, 2026-11: one extent a session, no subagents"
LEAST_REQUESTS = 20
"""Sessions with fewer are left out, there and here."""

PROCESSES = 2
KNEE = 1.0
"""The share from which on a pool gains little in either table."""

GRID = ((400, 0.25), (400, 0.5), (400, 1.0), (400, 2.0), (100, 1.0), (1_600, 1.0))
"""(live sessions, capacity over live sessions x LANE_TOKENS)"""

REFERENCE = {
    (400, 0.25): (0.364, 0.329, 0.304, 0.029),
    (400, 0.5): (0.790, 0.739, 0.766, 0.076),
    (400, 1.0): (0.959, 0.937, 0.949, 0.157),
    (400, 2.0): (0.963, 0.963, 0.963, 0.271),
    (100, 1.0): (0.945, 0.868, 0.915, 0.143),
    (1_600, 1.0): (0.954, 0.940, 0.953, 0.155),
}
COMPARED = ("pool", "sticky hash", "most cached", "round robin")
"""Columns of REFERENCE."""


def cache_table(path: Path, grid: Sequence[tuple[int, float]] = GRID) -> tuple[CacheRow, ...]:
    """A row for each point of `grid`, from a trace file or a folder of them, two rows at a time."""
    setups = [CacheSetup(lanes, share) for lanes, share in sorted(grid, reverse=True)]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = {(row.lanes, row.share): row for row in pool.map(cache_row, [path] * len(setups), setups)}
    return tuple(rows[point] for point in grid)


def cache_row(path: Path, setup: CacheSetup) -> CacheRow:
    """One row. ConfigError if no session is long enough."""
    sessions = [session for session in read_sessions(path) if session.num_requests >= LEAST_REQUESTS]
    if not sessions:
        raise ConfigError(f"{path}: no session has {LEAST_REQUESTS} requests; give longer ones to --sessions")
    return compare_caches(sessions, setup)


class CacheVerdict(msgspec.Struct, frozen=True):
    """What of the reference holds here.

    orders      rank correlation of hit rates over the columns both have, one per row
    largest     largest difference of a hit rate, in points
    knee_gain   points that a pool gains by twice the room that the live sessions need
    """

    orders: tuple[float, ...]
    largest: float
    knee_gain: float | None


def verdict(rows: Iterable[CacheRow]) -> CacheVerdict:
    """Ours against REFERENCE, over the rows that both have."""
    orders, differences = [], []
    pool: dict[tuple[int, float], float] = {}
    for row in rows:
        cells = _cells(row)
        pool[row.lanes, row.share] = cells["pool"].hit_rate
        theirs = REFERENCE.get((row.lanes, row.share))
        if theirs is None:
            continue
        ours = [cells[name].hit_rate for name in COMPARED]
        orders.append(kendall_tau(ours, theirs) or 0.0)
        differences += [abs(left - right) for left, right in zip(ours, theirs, strict=True)]
    gains = [
        pool[lanes, 2 * share] - hits for (lanes, share), hits in pool.items() if (lanes, 2 * share) in pool and share == KNEE
    ]
    return CacheVerdict(tuple(orders), 100 * max(differences, default=0.0), 100 * gains[0] if gains else None)


def table_lines(rows: Sequence[CacheRow]) -> list[str]:
    """The table as text: hit rate, the other program's, and the busiest rank's uncached work over the mean."""
    lines = [
        f"hit rates of agent sessions, caches alone ({RANKS} ranks; capacity = share x live sessions x {LANE_TOKENS:,} tokens)",
        f"  reference: {SOURCE}",
        f"  {'live':>5} {'share':>5} {'requests':>9}  " + " ".join(f"{name:^21}" for name in ARRANGEMENTS),
    ]
    for row in rows:
        theirs = dict(zip(COMPARED, REFERENCE.get((row.lanes, row.share), ()), strict=False))
        columns = []
        for name in ARRANGEMENTS:
            cell = _cells(row)[name]
            other = f"({theirs[name]:.3f})" if name in theirs else ""
            columns.append(f"{cell.hit_rate:6.3f} {other:7} x{cell.imbalance:5.2f}")
        lines.append(f"  {row.lanes:5} {row.share:5} {row.num_requests:9,}  " + " ".join(columns))
    found = verdict(rows)
    lines.append(f"  order of the four columns: rank correlation {', '.join(f'{tau:+.2f}' for tau in found.orders)}")
    lines.append(f"  largest difference {found.largest:.1f} points" + (
        "" if found.knee_gain is None else f"; beyond the knee a pool twice as large gains {found.knee_gain:.1f} points"
    ))  # fmt: skip
    return lines


def _cells(row: CacheRow) -> dict[str, CacheCell]:
    return {cell.arrangement: cell for cell in row.cells}
