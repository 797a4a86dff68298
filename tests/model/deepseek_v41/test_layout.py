"""Bytes of cached state, against the published figures."""

from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError
from rackserve.model.deepseek_v41.config import read_config
from rackserve.model.deepseek_v41.layout import kv_layout

from .test_config import FLASH


def test_the_released_model_keeps_890_bytes_per_token_and_its_windows() -> None:
    layout = kv_layout(read_config(FLASH), 256)
    assert layout.block_bytes == 227_840 == 256 * 890
    sizes = {group.name: group.bytes_per_slot for group in layout.groups if group.kind == "window"}
    assert sizes == {"windows": 2_703_360, "dspark_windows": 202_752, "open_groups": 12_288}


def test_replayed_prefixes_store_no_state_but_hand_it_over() -> None:
    config = read_config(FLASH)
    exact, bounded, decoder = (kv_layout(config, 256, mode) for mode in ("exact", "bounded_replay", "decoder_replay"))
    assert (exact.stores_state, bounded.stores_state, decoder.stores_state) == (True, False, False)
    assert bounded.has_window and bounded.replay_tokens == decoder.replay_tokens == decoder.tail_tokens == 128
    assert len({layout.fingerprint() for layout in (exact, bounded, decoder)}) == 3


def test_a_block_may_not_cut_a_group_of_two_tokens() -> None:
    with pytest.raises(ConfigError, match="even"):
        kv_layout(read_config(FLASH), 31)
