"""The KV blocks of one rank as tensors over memory that other processes read and write, block by block.

Block b is the bytes [b * block_bytes, (b + 1) * block_bytes), inside it [layer][key, value][kv_head][position][head_dim].
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from rackserve.base.errors import ConfigError
from rackserve.model.config import LlamaConfig
from rackserve.model.layout import KvDtype, kv_layout

TORCH_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class KvArena:
    """Typed access to the blocks. It owns no KV bytes: what another process wrote is what `read` returns.

    ConfigError if `memory` is read-only or too small.
    """

    __slots__ = ("_by_block", "_by_position", "block_tokens", "dtype", "head_dim", "kv_heads", "num_blocks", "num_layers")

    def __init__(
        self, memory: memoryview | mmap.mmap, config: LlamaConfig, num_blocks: int, block_tokens: int, dtype: KvDtype
    ) -> None:
        view = memoryview(memory)
        needed = num_blocks * kv_layout(config, block_tokens, dtype).block_bytes
        if view.readonly or view.nbytes < needed:
            access = "read-only" if view.readonly else "writable"
            raise ConfigError(
                f"arena of {view.nbytes} {access} bytes cannot hold {num_blocks} blocks: map {needed} writable bytes"
            )
        self.dtype = TORCH_DTYPES[dtype]
        self.num_blocks = num_blocks
        self.num_layers = config.num_layers
        self.block_tokens = block_tokens
        self.kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        flat = torch.frombuffer(view, dtype=self.dtype, count=needed // self.dtype.itemsize)
        self._by_block = flat.view(-1, block_tokens * self.head_dim)
        self._by_position = flat.view(-1, self.head_dim)

    def rows_of(self, blocks: Tensor) -> Tensor:
        """Rows for `read` of layer 0: int64 [2, kv_heads, *blocks.shape] for block ids `blocks`."""
        inner = torch.arange(2 * self.kv_heads).view(2, self.kv_heads, *[1] * blocks.dim())
        return blocks * (self.num_layers * 2 * self.kv_heads) + inner

    def slots_of(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Rows for `write` of layer 0: int64 [2 * kv_heads * n] for n positions at `offsets` in block ids `blocks`."""
        return (self.rows_of(blocks) * self.block_tokens + offsets).view(-1)

    def read(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """Copy what `rows` (from `rows_of`, flat) name in `layer` to `out`, contiguous and of the arena's dtype."""
        rows = rows + layer * 2 * self.kv_heads
        torch.index_select(self._by_block, 0, rows, out=out.view(len(rows), -1))

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys` and `values` [n, kv_heads, head_dim], rounded to the arena's dtype, at `slots` (from `slots_of`)."""
        slots = slots + layer * 2 * self.kv_heads * self.block_tokens
        both = torch.stack((keys, values)).transpose(1, 2).to(self.dtype)
        self._by_position.index_copy_(0, slots, both.reshape(-1, self.head_dim))
