"""Which owner holds which row of a table that is cut over machines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from rackserve.base.errors import ConfigError, InvariantError

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem


class Shards(msgspec.Struct, frozen=True):
    """A table of `num_rows` rows in `num_shards` consecutive parts, whose sizes differ by at most one row; some may be empty.

    ConfigError unless there is at least one shard.
    """

    num_rows: int
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.num_rows < 0:
            raise ConfigError(f"{self.num_rows} rows cannot be cut into {self.num_shards} shards; take 1 shard or more")

    def rows(self, shard: int) -> range:
        """The rows that `shard` owns."""
        return range(self._start(shard), self._start(shard + 1))

    def owner(self, row: int) -> int:
        """The one shard that owns `row`."""
        return ((row + 1) * self.num_shards - 1) // self.num_rows

    def cut(self, rising_rows: SupportsLenAndGetItem[int]) -> Iterator[tuple[int, slice]]:
        """(shard, its part of `rising_rows`) for each shard that owns some of them; the parts join up to all of them.

        InvariantError if the first or last row lies outside the table.
        """
        if not len(rising_rows):
            return
        if rising_rows[0] < 0 or rising_rows[-1] >= self.num_rows:
            raise InvariantError(f"rows {rising_rows[0]} to {rising_rows[-1]} asked of a table of {self.num_rows}")
        begin = 0
        while begin < len(rising_rows):
            shard = self.owner(int(rising_rows[begin]))
            end = bisect_left(rising_rows, self._start(shard + 1), begin)
            yield shard, slice(begin, end)
            begin = end

    def _start(self, shard: int) -> int:
        return shard * self.num_rows // self.num_shards
