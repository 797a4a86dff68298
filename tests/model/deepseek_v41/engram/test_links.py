from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rackserve.base.errors import InvariantError
from rackserve.model.deepseek_v41.engram.links import MappedLink, owned_rows
from tests.model.deepseek_v41.engram.tiny import NUM_ROWS, made_up, stored


def test_the_owned_rows_of_all_shards_are_the_tables() -> None:
    parts = [owned_rows({1: NUM_ROWS, 3: 7}, 18, shard) for shard in range(18)]
    assert sorted(row for part in parts for row in part[1]) == list(range(NUM_ROWS))
    assert sorted(row for part in parts for row in part[3]) == list(range(7))


def test_a_mapped_shard_gives_its_own_rows_in_any_order_repeated_or_none(tmp_path: Path) -> None:
    link = MappedLink(made_up(tmp_path), 4, 2)
    own = link.owned[3]
    for ids in ([own.start, own.stop - 1, own.start, own.start + 5], []):
        rows = np.array(ids, np.int64)
        assert np.array_equal(link.fetch(3, rows)(), stored(3)[rows])
    assert link.row_bytes == 33


def test_a_mapped_shard_gives_no_row_of_another(tmp_path: Path) -> None:
    link = MappedLink(made_up(tmp_path), 4, 2)
    for layer, row in ((1, link.owned[1].stop), (1, link.owned[1].start - 1), (2, 600)):
        with pytest.raises(InvariantError, match=f"layer {layer}"):
            link.fetch(layer, np.array([row]))
