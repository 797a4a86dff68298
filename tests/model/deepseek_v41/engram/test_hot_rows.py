from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.model.deepseek_v41.engram.hot_rows import WAYS, HotRows


def row_of(ids: np.ndarray) -> np.ndarray:
    return (ids[:, None] * np.array([1, 7, 31])).astype(np.uint8)


class Model:
    """Per set a dictionary in order of use."""

    def __init__(self, num_rows: int) -> None:
        self.ways = max(1, min(WAYS, num_rows))
        self.sets = [OrderedDict[int, None]() for _ in range(num_rows // self.ways)]

    def look_up(self, ids: list[int]) -> list[int]:
        """The ids that are missing, which are held from now on."""
        near = [self.sets[number % len(self.sets)] if self.sets else None for number in ids]
        missing = [number for number, held in zip(ids, near, strict=True) if held is None or number not in held]
        for number, held in zip(ids, near, strict=True):
            if held is not None and number in held:
                held.move_to_end(number)
        for at, held in enumerate(self.sets):
            new = [number for number in missing if number % len(self.sets) == at][: self.ways]
            while len(held) + len(new) > self.ways:
                held.popitem(last=False)
            held.update(dict.fromkeys(new))
        return missing


@given(st.sampled_from([0, 1, 3, 8, 17, 40]), st.lists(st.sets(st.integers(0, 60), max_size=30), max_size=12))
@settings(derandomize=True, max_examples=150, deadline=None)
def test_the_latest_used_rows_of_a_set_stay(num_rows: int, calls: list[set[int]]) -> None:
    hot, model = HotRows(num_rows, 3), Model(num_rows)
    for call in calls:
        ids = np.array(sorted(call), np.int64)
        rows = np.full((len(ids), 3), 99, np.uint8)
        missing = hot.fill(ids, rows)
        assert ids[missing].tolist() == model.look_up(ids.tolist())
        expected = row_of(ids)
        expected[missing] = 99
        assert np.array_equal(rows, expected)
        rows[missing] = row_of(ids[missing])
        hot.keep(ids[missing], rows, missing)
        assert len(hot) == sum(map(len, model.sets)) <= num_rows


@pytest.mark.parametrize("num_rows", [0, 5, 64])
def test_what_is_held_is_bounded_whatever_is_kept(num_rows: int) -> None:
    hot, ids = HotRows(num_rows, 3), np.arange(1000)
    hot.keep(ids, row_of(ids), ids)
    assert len(hot) == num_rows
