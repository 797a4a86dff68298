from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic

import numpy as np
import pytest
import torch

from rackserve.base.errors import ResourceError
from rackserve.model.deepseek_v41.engram import reader as reader_module
from rackserve.model.deepseek_v41.engram.links import MappedLink, RowLink
from rackserve.model.deepseek_v41.engram.ngrams import Addresses, NgramHash
from rackserve.model.deepseek_v41.engram.reader import EngramReader, open_engram
from rackserve.model.deepseek_v41.engram.sockets import ShardServer, SocketLink
from rackserve.model.deepseek_v41.engram.tables import RowIds, Rows, open_tables
from rackserve.model.deepseek_v41.engram.vocabulary import token_map
from tests.model.deepseek_v41.engram.tiny import (
    DIM,
    GOLDEN,
    LAYERS,
    NUM_ROWS,
    golden_location,
    made_up,
    plain_values,
    stored,
    tiny_config,
)

COLUMNS = 6
TABLES = dict.fromkeys(LAYERS, NUM_ROWS)
SOON_S = 5.0
VALUES = {layer: plain_values(stored(layer)) for layer in LAYERS}


class Watched:
    """A link that notes what is asked and waits, when taken from, until `gate` is open; it fails while `broken`."""

    def __init__(self, link: RowLink, is_near: bool = False) -> None:
        self._link, self.is_near = link, is_near
        self.asked: list[tuple[int, list[int]]] = []
        self.threads: list[int] = []
        self.gate, self.broken, self.closed = Event(), False, False
        self.gate.set()

    def fetch(self, layer: int, rows: RowIds) -> Callable[[], Rows]:
        self.asked.append((layer, rows.tolist()))
        self.threads.append(threading.get_ident())
        take = self._link.fetch(layer, rows)

        def wait() -> Rows:
            self.gate.wait(SOON_S)
            if self.broken or self.closed:
                raise ResourceError("the owner is gone")
            return take()

        return wait

    def close(self) -> None:
        self.closed = True
        self.gate.set()


@contextmanager
def reading(links: list[Watched], hot_rows: int = 0, limit_s: float = SOON_S) -> Iterator[EngramReader]:
    reader = EngramReader(TABLES, links, DIM, hot_rows, limit_s)
    try:
        yield reader
    finally:
        reader.close()


def watched(folder: Path, num_shards: int = 1) -> list[Watched]:
    tables = made_up(folder)
    return [Watched(MappedLink(tables, num_shards, shard)) for shard in range(num_shards)]


def drawn(seed: int, tokens: int) -> dict[int, Addresses]:
    """Addresses that repeat: a few rows are asked for again and again."""
    draw = np.random.default_rng(seed)
    return {layer: (draw.integers(0, NUM_ROWS, (tokens, COLUMNS)) // 7 * 7).astype(np.int64) for layer in LAYERS}


def plain(layer: int, addresses: Addresses) -> torch.Tensor:
    return torch.from_numpy(VALUES[layer][addresses].reshape(len(addresses), COLUMNS * DIM))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 18])
@pytest.mark.parametrize("hot_rows", [0, 1, 50, 5000])
def test_rows_are_those_of_the_unsplit_table(tmp_path: Path, num_shards: int, hot_rows: int) -> None:
    with reading(watched(tmp_path, num_shards), hot_rows) as reader:
        for seed, tokens in enumerate((0, 1, 7, 200, 1, 0, 40)):
            wanted = drawn(seed, tokens)
            pending = reader.begin(wanted)
            for layer in LAYERS:
                rows = pending.rows(layer)
                assert rows.dtype == torch.float32 and rows.shape == (tokens, COLUMNS * DIM)
                assert torch.equal(rows, plain(layer, wanted[layer]))


@pytest.mark.parametrize("num_shards", [1, 3, 18])
def test_every_row_of_the_table_can_be_read(tmp_path: Path, num_shards: int) -> None:
    every = np.arange(NUM_ROWS + 5).reshape(-1, COLUMNS) % NUM_ROWS
    with reading(watched(tmp_path, num_shards), 100) as reader:
        assert torch.equal(reader.begin({3: every}).rows(3), plain(3, every))


def test_a_row_is_asked_for_once_a_call_and_of_its_owner_alone(tmp_path: Path) -> None:
    links = watched(tmp_path, 4)
    with reading(links) as reader:
        wanted = drawn(1, 300)
        reader.begin({1: wanted[1]}).rows(1)
        reader.begin({1: np.full((9, COLUMNS), 1008)}).rows(1)
        reader.begin({1: np.empty((0, COLUMNS), np.int64)}).rows(1)
    asked = [rows for link in links for _, rows in link.asked]
    assert sorted(row for rows in asked for row in rows) == sorted([*np.unique(wanted[1]).tolist(), 1008])
    assert [len(link.asked) for link in links] == [1, 1, 1, 2]


def test_rows_that_are_kept_near_are_not_asked_for_again(tmp_path: Path) -> None:
    links = watched(tmp_path, 2)
    with reading(links, hot_rows=NUM_ROWS * 4) as reader:
        assert reader.hit_rate == 0
        for _ in range(4):
            reader.begin({1: np.array([[1, 2, 3, 1, 2, 1000]])}).rows(1)
        counts = reader.counts()
        assert (counts.uses, counts.hits, counts.misses, counts.fetched_bytes) == (24, 12, 4, (99, 33))
        assert reader.hit_rate == 0.75
    assert [link.asked for link in links] == [[(1, [1, 2, 3])], [(1, [1000])]]


def test_rows_are_fetched_while_the_caller_goes_on(tmp_path: Path) -> None:
    links, wanted = watched(tmp_path), drawn(2, 10)
    links[0].gate.clear()
    with reading(links) as reader:
        first, second = reader.begin(wanted), reader.begin(drawn(3, 2))
        links[0].gate.set()
        assert torch.equal(second.rows(3), plain(3, drawn(3, 2)[3]))
        assert torch.equal(first.rows(1), plain(1, wanted[1]))


def test_few_rows_that_are_near_are_there_at_once_but_for_a_while_after_a_slow_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Watched(MappedLink(made_up(tmp_path)), is_near=True)
    now = iter((0, 10, 20, 20 + reader_module.SLOW_NS + 1, *range(10**9, 10**9 + 1000, 10)))
    monkeypatch.setattr(reader_module.time, "monotonic_ns", partial(next, now))
    monkeypatch.setattr(reader_module, "CALLS_AWAY", 3)
    own = threading.get_ident()
    with reading([link]) as reader:
        for seed in range(8):
            wanted = {1: drawn(seed, 2)[1]}
            assert torch.equal(reader.begin(wanted).rows(1), plain(1, wanted[1]))
        by_asker = [thread == own for thread in link.threads]
        many = {1: drawn(8, reader_module.FEW_ROWS)[1]}
        assert torch.equal(reader.begin(many).rows(1), plain(1, many[1]))
    assert by_asker == [True, True, False, False, False, True, True, True]
    assert link.threads[-1] != own


def test_rows_are_read_in_the_order_asked_where_the_thread_still_reads(tmp_path: Path) -> None:
    link = Watched(MappedLink(made_up(tmp_path)), is_near=True)
    link.gate.clear()
    with reading([link], hot_rows=100) as reader:
        many, few = {1: drawn(8, reader_module.FEW_ROWS)[1]}, {1: drawn(9, 1)[1]}
        first, second = reader.begin(many), reader.begin(few)
        link.gate.set()
        assert torch.equal(second.rows(1), plain(1, few[1])) and torch.equal(first.rows(1), plain(1, many[1]))
    assert threading.get_ident() not in link.threads


def test_a_near_table_that_fails_tells_who_asks_for_its_rows(tmp_path: Path) -> None:
    link = Watched(MappedLink(made_up(tmp_path)), is_near=True)
    link.broken = True
    with reading([link]) as reader:
        pending = reader.begin(drawn(1, 1))
        with pytest.raises(ResourceError, match="the owner is gone"):
            pending.rows(1)


def test_all_owners_are_asked_before_one_is_waited_for(tmp_path: Path) -> None:
    links = watched(tmp_path, 3)
    links[0].gate.clear()
    with reading(links) as reader:
        # The gate of the first opens only once the last was asked.
        fetch = links[2].fetch

        def open_gate(layer: int, rows: RowIds) -> Callable[[], Rows]:
            links[0].gate.set()
            return fetch(layer, rows)

        links[2].fetch = open_gate  # type: ignore[method-assign]
        assert torch.equal(reader.begin({1: drawn(4, 50)[1]}).rows(1), plain(1, drawn(4, 50)[1]))


def test_rows_that_do_not_come_are_an_error_within_the_limit(tmp_path: Path) -> None:
    links = watched(tmp_path)
    links[0].gate.clear()
    with reading(links, limit_s=0.05) as reader:
        pending, begun = reader.begin(drawn(5, 3)), monotonic()
        with pytest.raises(ResourceError, match=r"layer 3 are not there after 0\.05 s"):
            pending.rows(3)
        assert monotonic() - begun < SOON_S
        links[0].gate.set()


@pytest.mark.parametrize("hot_rows", [0, 500])
def test_a_lost_owner_is_an_error_and_nothing_of_it_is_kept(tmp_path: Path, hot_rows: int) -> None:
    links, wanted = watched(tmp_path, 3), drawn(6, 60)
    with reading(links, hot_rows) as reader:
        links[1].broken = True
        pending = reader.begin(wanted)
        for layer in LAYERS:
            with pytest.raises(ResourceError, match="the owner is gone"):
                pending.rows(layer)
        links[1].broken = False
        pending = reader.begin(wanted)
        assert all(torch.equal(pending.rows(layer), plain(layer, wanted[layer])) for layer in LAYERS)


def test_a_lost_owner_does_not_matter_to_rows_of_others(tmp_path: Path) -> None:
    links = watched(tmp_path, 3)
    links[1].broken = True
    wanted = np.array([[0, 1, 2, 1006, 1007, 1008]])
    with reading(links) as reader:
        assert torch.equal(reader.begin({1: wanted}).rows(1), plain(1, wanted))


def test_closing_gives_up_what_is_pending(tmp_path: Path) -> None:
    links = watched(tmp_path)
    links[0].gate.clear()
    with reading(links, limit_s=60) as reader:
        pending = [reader.begin(drawn(7, 3)) for _ in range(3)]
    for each in pending:
        with pytest.raises(ResourceError, match=r"gone|given up"):
            each.rows(1)


def test_rows_of_other_processes_are_the_same(tmp_path: Path) -> None:
    config = tiny_config()
    tables = open_tables(golden_location, config)
    hashing = NgramHash(config, token_map(GOLDEN, config))
    wanted = hashing.addresses([([], np.load(GOLDEN / "golden.npz")["long_ids"])])
    near = open_engram(golden_location, config, ("",), 0)
    num_rows = {layer: table.num_rows for layer, table in tables.items()}
    owners = [MappedLink(tables, 3, shard) for shard in range(3)]
    servers = [ShardServer("tcp://127.0.0.1:0", owner) for owner in owners]
    links = [SocketLink(server.address, owner.owned, owner.row_bytes) for server, owner in zip(servers, owners, strict=True)]
    far = EngramReader(num_rows, [owners[0], *links[1:]], config.engram_head_dim, hot_rows=100)
    for layer in config.engram_layer_ids:
        expected = near.begin(wanted).rows(layer)
        assert expected.abs().sum() > 0
        assert torch.equal(far.begin(wanted).rows(layer), expected)
    for server in servers[1:]:
        server.close()
    with pytest.raises(ResourceError, match="is gone"):
        far.begin({1: np.arange(462).reshape(-1, 6)}).rows(1)
    for closing in (near, far, servers[0]):
        closing.close()


def test_a_checkpoint_may_be_read_in_shards(tmp_path: Path) -> None:
    config, every = tiny_config(), np.arange(462).reshape(-1, 6)
    readers = [open_engram(golden_location, config, ("",) * shards, hot) for shards, hot in ((1, 0), (5, 32))]
    first, second = (reader.begin({1: every}).rows(1) for reader in readers)
    assert torch.equal(first, second)
    assert [len(reader.counts().fetched_bytes) for reader in readers] == [1, 5]
    for reader in readers:
        reader.close()
