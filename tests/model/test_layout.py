from __future__ import annotations

import pytest
import torch

from rackserve.base.errors import ConfigError
from rackserve.model.kv_arena import TORCH_DTYPES
from rackserve.model.layout import VALUE_BYTES, kv_layout
from tests.model.tiny import CONFIG


def test_a_block_has_the_bytes_of_all_keys_and_values() -> None:
    assert kv_layout(CONFIG, 4, "bf16").block_bytes == 2 * 2 * 2 * 16 * 4 * 2
    assert kv_layout(CONFIG, 4, "fp32").block_bytes == 2 * kv_layout(CONFIG, 4, "bf16").block_bytes
    assert kv_layout(CONFIG, 4, "fp32").fingerprint() != kv_layout(CONFIG, 8, "bf16").fingerprint()


def test_sizes_are_those_of_the_formats_that_store_them() -> None:
    assert {name: torch.empty(1, dtype=dtype).element_size() for name, dtype in TORCH_DTYPES.items()} == VALUE_BYTES


def test_another_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"runner\.dtype must be one of bf16, fp32, got 'fp8'"):
        kv_layout(CONFIG, 4, "fp8")  # type: ignore[arg-type]
