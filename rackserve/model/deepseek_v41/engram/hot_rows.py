"""Rows kept near: a bounded cache in arrays, so that a whole batch of rows is looked up at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rackserve.model.deepseek_v41.engram.tables import RowIds, Rows

WAYS = 8
"""Rows that compete for room with each other only; the least recently used of them goes."""


class HotRows:
    """Copies of at most `num_rows` rows of `row_bytes` bytes. An id allows few places; in them, the latest used stay."""

    __slots__ = ("_clock", "_ids", "_rows", "_used", "_ways")

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self._ways = max(1, min(WAYS, num_rows))
        sets = num_rows // self._ways
        self._ids = np.full((sets, self._ways), -1, np.int64)
        self._used = np.zeros((sets, self._ways), np.int64)
        self._rows = np.empty((sets * self._ways, row_bytes), np.uint8)
        self._clock = 0

    def __len__(self) -> int:
        """Rows held."""
        return int((self._ids >= 0).sum())

    def fill(self, ids: RowIds, rows: Rows) -> NDArray[np.intp]:
        """Write the row of ids[i] to rows[i] [n, row_bytes] wherever it is held; returns the other i, rising."""
        if not len(self._ids):
            return np.arange(len(ids))
        sets = ids % len(self._ids)
        match = self._ids[sets] == ids[:, None]
        found = match.any(1)
        held = np.flatnonzero(found)
        slots = sets[held] * self._ways + match[held].argmax(1)
        self._touch(slots)
        rows[held] = self._rows.take(slots, 0)
        return np.flatnonzero(~found)

    def keep(self, ids: RowIds, rows: Rows, places: NDArray[np.intp]) -> None:
        """Hold rows[places[i]] as the row of ids[i] from now on. `ids` are distinct and none is held; what finds no place among
        the others of the call is not kept.
        """
        if not len(self._ids):
            return
        sets = ids % len(self._ids)
        order = sets.argsort(kind="stable")
        ordered = sets[order]
        # How many before it in this batch compete for the same places.
        rank = np.arange(len(ids)) - ordered.searchsorted(ordered)
        fits = rank < self._ways
        kept, ordered, rank = order[fits], ordered[fits], rank[fits]
        oldest = self._used[ordered].argsort(axis=1, kind="stable")
        slots = ordered * self._ways + np.take_along_axis(oldest, rank[:, None], 1)[:, 0]
        self._touch(slots)
        self._ids.reshape(-1)[slots] = ids[kept]
        self._rows[slots] = rows.take(places[kept], 0)

    def _touch(self, slots: NDArray[np.int64]) -> None:
        """Note that `slots` are used now, one after the other."""
        self._used.reshape(-1)[slots] = np.arange(self._clock + 1, self._clock + 1 + len(slots))
        self._clock += len(slots)
