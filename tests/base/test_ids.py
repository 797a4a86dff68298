"""Ranks are ordered, hashable values with a readable name."""

from __future__ import annotations

import msgspec

from rackserve.base.ids import POOL, POOL_RANK, Rank


def test_ranks_sort_by_worker_then_rank() -> None:
    ranks = [Rank("prefill1"), Rank("prefill0", 1), Rank("decode0"), Rank("prefill0")]
    assert sorted(ranks) == [Rank("decode0"), Rank("prefill0"), Rank("prefill0", 1), Rank("prefill1")]


def test_equal_ranks_are_one_key() -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(Rank("prefill0", 1)), type=Rank)
    assert {Rank("prefill0", 1): 1}[again] == 1


def test_a_rank_reads_as_worker_and_number() -> None:
    assert str(Rank("prefill0", 1)) == "prefill0.1"
    assert POOL_RANK.worker == POOL
