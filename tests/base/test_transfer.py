"""Regions are named so that a late write cannot reach a successor."""

from __future__ import annotations

from rackserve.base.ids import Rank
from rackserve.base.transfer import Copy, Transfer, arena_region, segment_region


def test_a_restarted_rank_has_another_region() -> None:
    names = {
        arena_region(Rank("prefill0", 0), 1),
        arena_region(Rank("prefill0", 0), 2),
        arena_region(Rank("prefill0", 1), 1),
        arena_region(Rank("decode0", 0), 1),
        segment_region(0),
        segment_region(1),
    }
    assert len(names) == 6


def test_a_transfer_counts_the_slots_of_all_copies() -> None:
    copies = (Copy("a", "b", "full", (1, 2), (3, 4)), Copy("a", "b", "window", (0,), (0,)))
    assert Transfer(1, "push", copies).num_slots == 3
