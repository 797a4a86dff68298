from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rackserve.model.attention import PIECE_PARTITIONS, Attention, Span
from rackserve.model.config import LlamaConfig
from rackserve.model.kv_arena import KvArena
from rackserve.model.layout import KvDtype, kv_layout
from tests.model import tiny

NUM_BLOCKS = 340
LAYER = 1


class Setup:
    """An arena whose unused memory is NaN, and sequences of random keys, values and queries in scattered blocks."""

    def __init__(
        self, lengths: Sequence[int], block_tokens: int, config: LlamaConfig = tiny.CONFIG, dtype: KvDtype = "fp32"
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + block_tokens)
        memory = bytearray(b"\xff" * (NUM_BLOCKS * kv_layout(config, block_tokens, dtype).block_bytes))
        arena = KvArena(memoryview(memory), config, NUM_BLOCKS, block_tokens, dtype)
        self.attention = Attention(arena, config.num_heads)
        free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        self.tables: list[list[int]] = []
        self.kv: list[tuple[Tensor, Tensor]] = []
        self.queries = [torch.randn(length, config.num_heads, config.head_dim, generator=generator) for length in lengths]
        for length in lengths:
            table = [free.pop() for _ in range(-(-length // block_tokens))]
            keys, values = (
                torch.randn(2, length, config.num_kv_heads, config.head_dim, generator=generator).to(arena.dtype).float()
            )
            positions = torch.arange(length)
            arena.write(
                LAYER, arena.slots_of(torch.tensor(table)[positions // block_tokens], positions % block_tokens), keys, values
            )
            self.tables.append(table)
            self.kv.append((keys, values))

    def attend(self, *parts: tuple[int, int, int]) -> list[Tensor]:
        """Outputs of (sequence, start, num_tokens) parts computed together."""
        spans = [Span(self.tables[number], start, count) for number, start, count in parts]
        query = torch.cat([self.queries[number][start : start + count] for number, start, count in parts])
        out = torch.empty(len(query), query.shape[1] * query.shape[2])
        self.attention.attend(LAYER, self.attention.plan(spans), query, out)
        return list(out.split([count for _, _, count in parts]))

    def naive(self, number: int, start: int, count: int) -> Tensor:
        """Softmax attention by the textbook, in float64."""
        keys, values = (x.double().repeat_interleave(self.queries[number].shape[1] // x.shape[1], 1) for x in self.kv[number])
        rows = []
        for at in range(start, start + count):
            scores = torch.einsum("hd,thd->ht", self.queries[number][at].double(), keys[: at + 1]) / keys.shape[2] ** 0.5
            rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[: at + 1]).reshape(-1))
        return torch.stack(rows).float()


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 330), min_size=1, max_size=4),
    block_tokens=st.sampled_from([4, 16, 64]),
    dtype=st.sampled_from(["bf16", "fp32"]),
    chunk=st.integers(1, 200),
)
def test_attention_over_scattered_blocks_is_attention(
    lengths: list[int], block_tokens: int, dtype: KvDtype, chunk: int
) -> None:
    setup = Setup(lengths, block_tokens, dtype=dtype)
    singles = [(number, length - 1, 1) for number, length in enumerate(lengths)]
    first = lengths[0]
    count = min(chunk, first)
    parts = [*singles, (0, first - count, count)] if count > 1 else singles
    for part, out in zip(parts, setup.attend(*parts), strict=True):
        torch.testing.assert_close(out, setup.naive(*part), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_the_bits_of_an_output_do_not_depend_on_its_neighbours(heads: int) -> None:
    config = msgspec.structs.replace(tiny.CONFIG, num_heads=heads, num_kv_heads=2)
    setup = Setup([300, 7, 129], 16, config)
    whole = setup.attend((0, 0, 300))[0]
    for start, count in [(0, 2), (100, 64), (127, 3), (137, 163), (298, 2)]:
        assert torch.equal(setup.attend((0, start, count))[0], whole[start : start + count])
    for at in (0, 5, 127, 128, 299):
        alone = setup.attend((0, at, 1))[0]
        beside = setup.attend((1, 6, 1), (0, at, 1), (2, 128, 1), (2, 0, 100))[1]
        assert torch.equal(alone[0], whole[at]) and torch.equal(beside[0], whole[at])


def test_a_batch_longer_than_one_piece_is_put_together_right() -> None:
    setup = Setup([500, 500, 500], 16)
    assert PIECE_PARTITIONS < 3 * 4
    for part, out in zip([(n, 499, 1) for n in range(3)], setup.attend((0, 499, 1), (1, 499, 1), (2, 499, 1)), strict=True):
        torch.testing.assert_close(out, setup.naive(*part), rtol=1e-5, atol=1e-5)
