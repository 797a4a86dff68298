from __future__ import annotations

import mmap

import pytest
import torch

from rackserve.base.errors import ConfigError
from rackserve.model.kv_arena import KvArena
from rackserve.model.layout import KvDtype, kv_layout
from tests.model.tiny import CONFIG

NUM_BLOCKS, BLOCK_TOKENS = 5, 4


def empty(dtype: KvDtype = "fp32") -> tuple[bytearray, KvArena]:
    memory = bytearray(NUM_BLOCKS * kv_layout(CONFIG, BLOCK_TOKENS, dtype).block_bytes)
    return memory, KvArena(memoryview(memory), CONFIG, NUM_BLOCKS, BLOCK_TOKENS, dtype)


def fill(arena: KvArena, block: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = torch.full((BLOCK_TOKENS,), block), torch.arange(BLOCK_TOKENS)
    for layer in range(CONFIG.num_layers):
        both = torch.randn(2, BLOCK_TOKENS, CONFIG.num_kv_heads, CONFIG.head_dim, generator=generator)
        arena.write(layer, arena.slots_of(*places), both[0], both[1])


def read(arena: KvArena, layer: int, blocks: list[int]) -> torch.Tensor:
    out = torch.empty(2, CONFIG.num_kv_heads, len(blocks), BLOCK_TOKENS, CONFIG.head_dim, dtype=arena.dtype)
    arena.read(layer, arena.rows_of(torch.tensor(blocks)).view(-1), out)
    return out


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_block_is_written_inside_its_own_bytes_and_fills_them(dtype: KvDtype) -> None:
    memory, arena = empty(dtype)
    memory[:] = b"\xff" * len(memory)
    fill(arena, 3, seed=1)
    size = kv_layout(CONFIG, BLOCK_TOKENS, dtype).block_bytes
    assert set(memory[: 3 * size]) == set(memory[4 * size :]) == {0xFF}
    values = torch.frombuffer(memory, dtype=arena.dtype)[3 * size // arena.dtype.itemsize : 4 * size // arena.dtype.itemsize]
    assert values.isfinite().all()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_block_copied_as_bytes_reads_the_same_elsewhere(dtype: KvDtype) -> None:
    memory, arena = empty(dtype)
    fill(arena, 0, seed=1)
    fill(arena, 1, seed=2)
    other_memory, other = empty(dtype)
    size = kv_layout(CONFIG, BLOCK_TOKENS, dtype).block_bytes
    other_memory[4 * size :] = memory[:size]
    other_memory[2 * size : 3 * size] = memory[size : 2 * size]
    for layer in range(CONFIG.num_layers):
        assert torch.equal(read(other, layer, [4, 2]), read(arena, layer, [0, 1]))
    assert not torch.equal(read(arena, 0, [0]), read(arena, 1, [0]))


def test_keys_values_heads_and_positions_come_back_in_their_places() -> None:
    _, arena = empty()
    keys = torch.arange(2 * 2 * 16).view(2, 2, 16).float()
    arena.write(1, arena.slots_of(torch.tensor([2, 4]), torch.tensor([3, 0])), keys, -keys)
    out = read(arena, 1, [2, 4])
    assert torch.equal(out[0, :, 0, 3], keys[0]) and torch.equal(out[0, :, 1, 0], keys[1])
    assert torch.equal(out[1, :, 0, 3], -keys[0]) and torch.equal(out[1, :, 1, 0], -keys[1])
    assert int(out.count_nonzero()) == 2 * 2 * 2 * 16 - 2


def test_memory_that_does_not_fit_is_refused() -> None:
    size = NUM_BLOCKS * kv_layout(CONFIG, BLOCK_TOKENS, "bf16").block_bytes
    KvArena(mmap.mmap(-1, size), CONFIG, NUM_BLOCKS, BLOCK_TOKENS, "bf16")
    with pytest.raises(ConfigError, match=f"map {size} writable bytes"):
        KvArena(memoryview(bytearray(size - 1)), CONFIG, NUM_BLOCKS, BLOCK_TOKENS, "bf16")
    with pytest.raises(ConfigError, match="read-only"):
        KvArena(memoryview(bytes(size)), CONFIG, NUM_BLOCKS, BLOCK_TOKENS, "bf16")
