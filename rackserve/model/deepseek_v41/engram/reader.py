"""Rows for a step, fetched while something else is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rackserve.base.errors import ResourceError
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.engram.hot_rows import HotRows
from rackserve.model.deepseek_v41.engram.links import MappedLink, RowLink, owned_rows
from rackserve.model.deepseek_v41.engram.ngrams import Addresses
from rackserve.model.deepseek_v41.engram.sockets import SocketLink
from rackserve.model.deepseek_v41.engram.tables import Location, RowIds, Rows, dequantise, open_tables, row_bytes
from rackserve.pool.shards import Shards

LIMIT_S = 30.0
"""How long a step waits for its rows; longer than a link waits for its owner, so that the error says which owner it was."""

FEW_ROWS = 512
"""Addresses of a call up to which rows that are near are read by who asks: a thread that is woken costs more."""

SLOW_NS = 1_000_000
"""A read by who asks that took longer met storage: what is mapped was not in memory."""

CALLS_AWAY = 200
"""Calls after such a read that are the thread's, so that storage is read while something else is computed."""


class RowCounts(msgspec.Struct, frozen=True):
    """What a reader has done. `hits` and `misses` count the distinct rows of each call, `uses` their repetitions as well."""

    uses: int
    hits: int
    misses: int
    fetched_bytes: tuple[int, ...]
    """Per shard."""


class PendingRows:
    """Rows on their way."""

    __slots__ = ("_limit_s", "_tables")

    def __init__(self, tables: Mapping[int, Future[Tensor]], limit_s: float) -> None:
        self._tables, self._limit_s = tables, limit_s

    def rows(self, layer: int) -> Tensor:
        """float32 [T, columns * dim], columns in the order of the addresses. Waits for them, but no longer than the limit.

        ResourceError if they are not there by then, or cannot be fetched.
        """
        try:
            return self._tables[layer].result(self._limit_s)
        except TimeoutError as error:
            raise ResourceError(
                f"Engram rows of layer {layer} are not there after {self._limit_s:g} s; read them from faster storage, or use "
                "smaller steps"
            ) from error
        except CancelledError as error:
            raise ResourceError(f"Engram rows of layer {layer} were given up: their reader was closed") from error


class EngramReader:
    """Reads rows of the tables of `num_rows` by layer, cut over `links` in their order (link i owns shard i of every table).

    dim       values of a row
    hot_rows  rows of each table that are kept near, 0 for none; pays where links cross machines
    limit_s   how long `PendingRows.rows` waits

    One thread at a time may use it. A thread per table fetches, but for few rows that all lie near.
    """

    __slots__ = ("_limit_s", "_links", "_tables")

    def __init__(
        self,
        num_rows: Mapping[int, int],
        links: Sequence[RowLink],
        dim: int,
        hot_rows: int = 0,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._links, self._limit_s = tuple(links), limit_s
        self._tables = {layer: _TableReader(layer, rows, self._links, dim, hot_rows) for layer, rows in num_rows.items()}

    def begin(self, addresses: Mapping[int, Addresses]) -> PendingRows:
        """Start to fetch the rows at `addresses`, int64 [T, columns] by layer, T of 0 included.

        Returns at once, with few rows of mapped tables already there.
        """
        return PendingRows({layer: self._tables[layer].begin(wanted) for layer, wanted in addresses.items()}, self._limit_s)

    def counts(self) -> RowCounts:
        """Over all tables since the beginning."""
        tables = self._tables.values()
        fetched = [sum(table.fetched_bytes[shard] for table in tables) for shard in range(len(self._links))]
        return RowCounts(
            sum(table.uses for table in tables),
            sum(table.hits for table in tables),
            sum(table.misses for table in tables),
            tuple(fetched),
        )

    @property
    def hit_rate(self) -> float:
        """Part of the distinct rows of calls that were kept near; 0 before the first."""
        counts = self.counts()
        return counts.hits / max(counts.hits + counts.misses, 1)

    def close(self) -> None:
        """Give up what is pending, let go of the links, end the threads."""
        for table in self._tables.values():
            table.stop()
        for link in self._links:
            link.close()
        for table in self._tables.values():
            table.join()


class _TableReader:
    """One layer's table: its thread, which alone uses hot rows and counts while it has something to read."""

    __slots__ = ("_away", "_dim", "_hot", "_is_near", "_last", "_layer", "_links", "_shards", "_thread", "fetched_bytes",
                 "hits", "misses", "uses")  # fmt: skip

    def __init__(self, layer: int, num_rows: int, links: Sequence[RowLink], dim: int, hot_rows: int) -> None:
        self._layer, self._links, self._dim = layer, links, dim
        self._shards = Shards(num_rows, len(links))
        self._hot = HotRows(min(hot_rows, num_rows), row_bytes(dim))
        self._thread = ThreadPoolExecutor(1, f"engram {layer}")
        self._is_near = all(link.is_near for link in links)
        self._last: Future[Tensor] | None = None
        self._away = 0
        self.uses = self.hits = self.misses = 0
        self.fetched_bytes = [0] * len(links)

    def begin(self, addresses: Addresses) -> Future[Tensor]:
        still_reads = self._last is not None and not self._last.done()
        if self._away or still_reads or not self._is_near or addresses.size > FEW_ROWS:
            self._away = max(0, self._away - 1)
            self._last = self._thread.submit(self._read, addresses)
            return self._last
        found, begun = Future[Tensor](), time.monotonic_ns()
        try:
            found.set_result(self._read(addresses))
        except Exception as error:  # told to who asks for the rows, as the thread's are
            found.set_exception(error)
        if time.monotonic_ns() - begun > SLOW_NS:
            self._away = CALLS_AWAY
        return found

    def stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        self._thread.shutdown()

    def _read(self, addresses: Addresses) -> Tensor:
        """float32 [T, columns * dim]."""
        ids, places = np.unique(addresses, return_inverse=True)
        rows = np.empty((len(ids), row_bytes(self._dim)), np.uint8)
        missing = self._hot.fill(ids, rows)
        self.uses += addresses.size
        self.hits += len(ids) - len(missing)
        self.misses += len(missing)
        self._fetch(ids[missing], rows, missing)
        self._hot.keep(ids[missing], rows, missing)
        values = dequantise(rows, self._dim).take(places.reshape(-1), 0)
        return torch.from_numpy(values.reshape(len(addresses), addresses.shape[1] * self._dim))

    def _fetch(self, ids: RowIds, rows: Rows, places: NDArray[np.intp]) -> None:
        """Write the row of ids[i] to rows[places[i]]. `ids` rise; all their owners are asked before any answer is awaited."""
        asked = [
            (shard, places[part], self._links[shard].fetch(self._layer, ids[part])) for shard, part in self._shards.cut(ids)
        ]
        for shard, at, take in asked:
            found = take()
            rows[at] = found
            self.fetched_bytes[shard] += found.nbytes


def open_engram(
    location: Callable[[str], Location], config: DeepseekV41Config, owners: Sequence[str], hot_rows: int
) -> EngramReader:
    """A reader of the tables of a checkpoint, cut into one shard for each of `owners`.

    owners    "": the shard is mapped from the checkpoint here, where `location` says; else the address of its owner
    hot_rows  rows of each table to keep near

    FileFormatError if a table does not fit `config`, ConfigError if an owner is no address.
    """
    num_rows = dict(zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True))
    tables = open_tables(location, config) if "" in owners else {}
    links: list[RowLink] = [
        SocketLink(owner, owned_rows(num_rows, len(owners), shard), row_bytes(config.engram_head_dim))
        if owner
        else MappedLink(tables, len(owners), shard)
        for shard, owner in enumerate(owners)
    ]
    return EngramReader(num_rows, links, config.engram_head_dim, hot_rows)
