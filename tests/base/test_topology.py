"""A rack as data."""

from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.ids import Rank
from rackserve.base.topology import Topology


def test_ranks_are_listed_worker_by_worker() -> None:
    topology = Topology(prefill_workers=2, decode_workers=1, prefill_ranks=2, decode_ranks=1)
    assert topology.workers("prefill") == ("prefill0", "prefill1")
    assert topology.ranks("prefill") == (Rank("prefill0", 0), Rank("prefill0", 1), Rank("prefill1", 0), Rank("prefill1", 1))
    assert topology.ranks("decode") == (Rank("decode0"),)
    assert (topology.group_size("prefill"), topology.group_size("decode")) == (2, 1)


def test_each_tray_has_its_own_segment_if_there_is_a_pool() -> None:
    assert Topology(prefill_workers=2, decode_workers=1).num_segments == 3
    assert Topology(pool=False, segment_blocks=0).num_segments == 0


@pytest.mark.parametrize(
    "name", ["prefill_workers", "decode_workers", "prefill_ranks", "decode_ranks", "prefill_blocks", "decode_blocks"]
)
def test_nothing_may_be_absent(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"topology\.{name}"):
        Topology(**{name: 0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_workers", 4097),
        ("decode_workers", 10**12),
        ("prefill_ranks", 65),
        ("decode_ranks", 65),
        ("prefill_blocks", 10**8 + 1),
        ("decode_blocks", 2**63),
        ("segment_blocks", 10**8 + 1),
        ("segment_blocks", -1),
        ("rank_windows", -1),
        ("segment_windows", -1),
        ("rank_windows", 10**8 + 1),
        ("segment_windows", 10**8 + 1),
    ],
)
def test_what_no_rack_has_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"topology\.{name} must be at (most|least) \d+, got {value}"):
        Topology(**{name: value})


def test_blocks_are_bounded_over_the_whole_rack() -> None:
    most = 10**8 - 1024  # one decode rank's
    Topology(prefill_workers=1000, prefill_ranks=2, prefill_blocks=most // 2000, pool=False)
    with pytest.raises(ConfigError, match=r"topology: all arenas .* hold 100001024 blocks .*lower topology\.prefill_blocks"):
        Topology(prefill_workers=1000, prefill_ranks=2, prefill_blocks=50_000, pool=False)


def test_a_pool_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"topology\.segment_blocks"):
        Topology(segment_blocks=0)


def test_blocks_differ_by_role() -> None:
    topology = Topology(prefill_blocks=3, decode_blocks=5)
    assert (topology.num_blocks("prefill"), topology.num_blocks("decode")) == (3, 5)
