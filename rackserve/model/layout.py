"""How much memory the KV of a model takes. No tensor is touched, so the control process can ask without torch."""

from __future__ import annotations

from typing import Literal

from rackserve.base.errors import ConfigError
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.model.config import LlamaConfig

KvDtype = Literal["bf16", "fp32"]

VALUE_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}


def kv_layout(config: LlamaConfig, block_tokens: int, dtype: KvDtype) -> KvLayout:
    """Bytes per block of `block_tokens` positions with keys and values stored as `dtype`. ConfigError on an unknown dtype."""
    if dtype not in VALUE_BYTES:
        raise ConfigError(f"runner.dtype must be one of {', '.join(VALUE_BYTES)}, got {dtype!r}")
    values = config.num_layers * 2 * config.num_kv_heads * config.head_dim * block_tokens
    return KvLayout(block_tokens, (KvGroup(f"kv.{dtype}", "full", values * VALUE_BYTES[dtype]),))
