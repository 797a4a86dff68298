"""Layouts: what a block costs, and when two may share bytes."""

from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.kv_layout import KvGroup, KvLayout

FULL = KvGroup("k", "full", 100)


def test_sizes_are_summed_by_kind() -> None:
    layout = KvLayout(16, (FULL, KvGroup("i", "full", 20), KvGroup("w", "window", 7), KvGroup("d", "window", 3)))
    assert (layout.block_bytes, layout.window_bytes, layout.has_window) == (120, 10, True)
    assert not KvLayout(16, (FULL,)).has_window


def test_a_fingerprint_differs_whenever_bytes_would_be_read_differently() -> None:
    layouts = [
        KvLayout(16, (FULL,)),
        KvLayout(8, (FULL,)),
        KvLayout(16, (KvGroup("k2", "full", 100),)),
        KvLayout(16, (KvGroup("k", "full", 101),)),
        KvLayout(16, (FULL, KvGroup("w", "window", 5))),
        KvLayout(16, (FULL, KvGroup("w", "full", 5))),
    ]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_layout\.block_tokens"):
        KvLayout(0, (FULL,))
    with pytest.raises(ConfigError, match=r"kv_layout\.groups"):
        KvLayout(16, (KvGroup("w", "window", 5),))
