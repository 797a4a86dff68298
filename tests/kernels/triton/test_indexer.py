from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.model.deepseek_v41.indexer import Indexer, best
from rackserve.model.deepseek_v41.rounding import pack_fp4, round_fp4, unpack_fp4
from tests.kernels.triton.drawn import ending, fenced, noise, permuted, poisoned

indexer = pytest.importorskip("rackserve.kernels.triton.indexer")
selection = pytest.importorskip("rackserve.kernels.triton.selection")

VISIBLE = [1, 150, 37, 0, 128]
WIDTH, BLOCK_ROWS, HEADS, DIM, SIZE = 151, 16, 5, 96, 4
INF = float("inf")


def drawn() -> tuple[Tensor, Tensor, Any, Tensor]:
    """Queries of five sequences, their weights, their keys in a poisoned arena, and those keys unpacked."""
    count, blocks = len(VISIBLE), -(-WIDTH // BLOCK_ROWS)
    queries, weights = fenced(round_fp4(noise(count, HEADS, DIM))), noise(count, HEADS, seed=1)
    arena = poisoned(count * blocks, BLOCK_ROWS * (DIM // 2 + DIM // 32) + 24)
    cache = arena[:, 24:].unflatten(1, (BLOCK_ROWS, -1))
    tables = permuted(count * blocks).view(count, blocks)
    tables = fenced(ending(tables, count * blocks - 1, 4, VISIBLE[4] // BLOCK_ROWS - 1).int())
    unpacked = torch.zeros(count, WIDTH, DIM)
    for number, length in enumerate(VISIBLE):
        packed = pack_fp4(noise(length, DIM, seed=number))
        unpacked[number, :length] = unpack_fp4(packed, DIM)
        for row, stored in enumerate(packed):
            cache[tables[number, row // BLOCK_ROWS], row % BLOCK_ROWS] = stored
    keys = indexer.Keys(cache, tables, fenced(torch.arange(count).int()), fenced(torch.tensor(VISIBLE).int()))
    return queries, weights, keys, unpacked


QUERIES, WEIGHTS, KEYS, UNPACKED = drawn()


def wanted(dtype: torch.dtype = torch.float64) -> Tensor:
    dots = (QUERIES.to(dtype) @ UNPACKED.to(dtype).transpose(1, 2)).relu()
    hidden = torch.arange(WIDTH) >= torch.tensor(VISIBLE)[:, None]
    return (WEIGHTS.to(dtype)[..., None] * dots).sum(1).masked_fill(hidden, -INF)


def close(found: Tensor, right: Tensor) -> bool:
    there = right > -INF
    return torch.equal(found > -INF, there) and torch.allclose(found[there].double(), right[there], rtol=1e-5, atol=1e-5)


def test_scores_agree_with_float64_and_are_nothing_where_no_row_is_visible() -> None:
    assert close(indexer.scores(QUERIES, WEIGHTS, KEYS, WIDTH), wanted())


def test_served_number_formats_change_nothing_since_rounded_queries_are_exact_in_them() -> None:
    found = indexer.scores(QUERIES.bfloat16(), WEIGHTS, KEYS, WIDTH)
    assert torch.equal(found, indexer.scores(QUERIES, WEIGHTS, KEYS, WIDTH))


def test_a_query_has_the_same_bits_alone_and_in_any_width() -> None:
    together = indexer.scores(QUERIES, WEIGHTS, KEYS, WIDTH)
    for number, length in enumerate(VISIBLE):
        part = slice(number, number + 1)
        keys = indexer.Keys(KEYS.cache, KEYS.tables, KEYS.sequences[part], KEYS.visible[part])
        alone = indexer.scores(QUERIES[part], WEIGHTS[part], keys, length)
        assert torch.equal(alone[0], together[number, :length])


def test_blocks_have_their_best_score_and_the_newest_is_pinned_as_in_the_reference() -> None:
    scores = wanted(torch.float32)
    blocks = indexer.block_scores(scores, KEYS.visible, SIZE)
    reference = Indexer.__new__(Indexer)
    reference._config = SimpleNamespace(candidate_block_size=SIZE, candidate_topk_blocks=6)  # type: ignore[assignment]
    mask = reference._candidates(scores, torch.tensor(VISIBLE))
    chosen = selection.select(blocks, 6)
    mine = torch.zeros(len(VISIBLE), blocks.shape[1] + 1, dtype=torch.bool)
    mine.scatter_(1, chosen.long().where(chosen >= 0, blocks.shape[1]), True)
    assert torch.equal(mine[:, :-1].repeat_interleave(SIZE, 1)[:, :WIDTH], mask)


def test_rows_chosen_among_candidates_are_those_that_the_reference_chooses() -> None:
    scores = indexer.scores(QUERIES, WEIGHTS, KEYS, WIDTH)
    chosen = selection.select(indexer.block_scores(scores, KEYS.visible, SIZE), 6)
    some = indexer.candidate_scores(QUERIES, WEIGHTS, KEYS, chosen, SIZE)
    among = torch.zeros(len(VISIBLE), WIDTH + SIZE, dtype=torch.bool)
    for number, blocks in enumerate(chosen.tolist()):
        for block in blocks:
            if block >= 0:
                among[number, block * SIZE : (block + 1) * SIZE] = True
    right = best(scores.masked_fill(~among[:, :WIDTH], -INF), 9)
    assert torch.equal(selection.select(some, 9, chosen, SIZE).long(), right)


def test_nothing_and_wrong_shapes() -> None:
    assert indexer.scores(QUERIES, WEIGHTS, KEYS, 0).shape == (5, 0)
    assert indexer.block_scores(torch.empty(5, 0), KEYS.visible, 4).shape == (5, 0)
    with pytest.raises(InvariantError, match="weights is "):
        indexer.scores(QUERIES, WEIGHTS[:, 1:].contiguous(), KEYS, WIDTH)
