from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.pool.shards import Shards

SIZES = [(1009, 1), (1009, 2), (1009, 3), (1009, 4), (1009, 18), (3, 5), (0, 2), (384006168, 18)]


@pytest.mark.parametrize(("num_rows", "num_shards"), SIZES)
def test_shards_join_up_and_differ_by_one_row_at_most(num_rows: int, num_shards: int) -> None:
    parts = [Shards(num_rows, num_shards).rows(shard) for shard in range(num_shards)]
    assert parts[0].start == 0 and parts[-1].stop == num_rows
    assert all(low.stop == high.start for low, high in pairwise(parts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("num_rows", "num_shards"), [size for size in SIZES if 0 < size[0] < 10_000])
def test_every_row_has_exactly_one_owner(num_rows: int, num_shards: int) -> None:
    shards = Shards(num_rows, num_shards)
    for row in range(num_rows):
        assert [shard for shard in range(num_shards) if row in shards.rows(shard)] == [shards.owner(row)]


@given(st.integers(1, 40), st.integers(1, 9), st.lists(st.integers(0, 39), max_size=20))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_cut_groups_rows_by_owner_like_asking_for_each(num_rows: int, num_shards: int, rows: list[int]) -> None:
    shards, rising = Shards(num_rows, num_shards), sorted(row for row in rows if row < num_rows)
    groups = [(shard, rising[part]) for shard, part in shards.cut(rising)]
    owners = sorted({shards.owner(row) for row in rising})
    assert groups == [(owner, [row for row in rising if shards.owner(row) == owner]) for owner in owners]


def test_a_row_outside_the_table_is_a_bug_not_somebodys_row() -> None:
    for rows in ([-1, 3], [3, 1009]):
        with pytest.raises(InvariantError, match="1009"):
            list(Shards(1009, 4).cut(rows))


def test_no_shards_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="0 shards"):
        Shards(1009, 0)
