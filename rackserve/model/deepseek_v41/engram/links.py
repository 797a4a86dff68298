"""How rows are reached, whoever owns them: one link per shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from rackserve.base.errors import InvariantError
from rackserve.model.deepseek_v41.engram.tables import EngramTable, RowIds, Rows, row_bytes
from rackserve.pool.shards import Shards


class RowLink(Protocol):
    """The way to one shard of every table. Threads may use it at the same time.

    is_near  whether rows are read from memory (or what is mapped into it), and nobody is asked
    """

    @property
    def is_near(self) -> bool: ...

    def fetch(self, layer: int, rows: RowIds) -> Callable[[], Rows]:
        """Ask for `rows` [n] of a layer's table, all owned by this shard, in any order, repeated or none.

        Call the result to wait for them. Either call raises ResourceError once the owner has not answered within the limit.
        """

    def close(self) -> None:
        """Let go of the owner; what is still waited for fails."""


def owned_rows(num_rows: Mapping[int, int], num_shards: int, shard: int) -> dict[int, range]:
    """Rows that `shard` owns of each layer's table, given the tables' lengths."""
    return {layer: Shards(rows, num_shards).rows(shard) for layer, rows in num_rows.items()}


class MappedLink:
    """Shard `shard` of `num_shards` of tables that are mapped into this process. All `tables` have rows of one size."""

    __slots__ = ("_tables", "owned", "row_bytes")
    is_near = True

    def __init__(self, tables: Mapping[int, EngramTable], num_shards: int = 1, shard: int = 0) -> None:
        self._tables = dict(tables)
        self.owned = owned_rows({layer: table.num_rows for layer, table in tables.items()}, num_shards, shard)
        self.row_bytes = row_bytes(next(iter(tables.values())).dim)

    def fetch(self, layer: int, rows: RowIds) -> Callable[[], Rows]:
        """The rows are read when the result is called. InvariantError if one of them is not of this shard."""
        owned = self.owned.get(layer)
        if owned is None or (len(rows) and not (owned.start <= rows.min() and rows.max() < owned.stop)):
            raise InvariantError(f"layer {layer}: {len(rows)} rows were asked of the owner of {owned}, not all of them its own")
        return partial(self._tables[layer].read, rows)

    def close(self) -> None:
        """Nothing to let go of: the maps go with the tables."""
