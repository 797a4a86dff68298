from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rackserve.model.deepseek_v41.indexer import ROWS_AT_ONCE, Indexer, best
from rackserve.model.deepseek_v41.linear import Linear, choose_products
from rackserve.model.deepseek_v41.rotation import Rotation, frequencies
from rackserve.model.deepseek_v41.rounding import pack_fp4, round_fp4, unpack_fp4
from rackserve.model.deepseek_v41.spans import Span
from rackserve.model.deepseek_v41.state import SequenceState
from tests.model.deepseek_v41.golden import CONFIG, linear, noise, open_arena, poisoned, weights

PAIRED, SINGLE, AGAIN = CONFIG.index_source_layer_ids
HEADS, DIM = CONFIG.index_n_heads, CONFIG.index_head_dim
INF = float("inf")

scores_with_ties = st.integers(0, 12).flatmap(
    lambda width: st.lists(
        st.lists(st.sampled_from([-INF, -1.0, 0.0, 0.5, 2.0]), min_size=width, max_size=width), min_size=1, max_size=4
    )
)


def naive_best(row: list[float], count: int) -> list[int]:
    order = sorted(range(len(row)), key=lambda number: (-row[number], number))
    chosen = [number for number in order[:count] if row[number] > -INF]
    return [-1] * (count - len(chosen)) + sorted(chosen)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(rows=scores_with_ties, count=st.integers(1, 14))
def test_of_equal_rows_the_lowest_numbers_are_chosen(rows: list[list[float]], count: int) -> None:
    got = best(torch.tensor(rows).view(len(rows), -1), count)
    assert got.tolist() == [naive_best(row, count) for row in rows]


def naive_candidates(row: list[float], visible: int) -> list[bool]:
    size, count = CONFIG.candidate_block_size, CONFIG.candidate_topk_blocks
    blocks = [max(row[begin : begin + size]) for begin in range(0, len(row), size)]
    if visible:
        blocks[(visible - 1) // size] = INF
    chosen = naive_best(blocks, count)
    return [number // size in chosen for number in range(len(row))]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data(), width=st.integers(1, 40))
def test_candidates_are_the_best_blocks_and_always_the_newest(data: st.DataObject, width: int) -> None:
    visible = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=3))
    number = st.sampled_from([0.0, -1.0, 0.5, 1.0, 2.0, 3.0])
    rows = [[data.draw(number) if place < seen else -INF for place in range(width)] for seen in visible]
    got = Indexer(CONFIG, weights(), SINGLE, linear())._candidates(torch.tensor(rows), torch.tensor(visible))
    assert got.tolist() == [naive_candidates(row, seen) for row, seen in zip(rows, visible, strict=True)]


def test_a_score_is_a_weighted_sum_over_heads_of_what_is_positive() -> None:
    indexer = Indexer(CONFIG, weights(), SINGLE, linear())
    queries, shares, keys = noise(5, HEADS, DIM), noise(5, HEADS, seed=1), noise(2 * ROWS_AT_ONCE + 9, DIM, seed=2)
    want = (torch.einsum("nhd,rd->nhr", queries, keys).relu() * shares[:, :, None]).sum(1)
    assert torch.allclose(indexer._scores(queries, shares, keys), want, atol=1e-4)


def test_a_score_does_not_depend_on_how_many_rows_and_queries_there_are() -> None:
    indexer = Indexer(CONFIG, weights(), SINGLE, Linear(choose_products(CONFIG, weights()), round_inputs=False))
    queries, shares, keys = noise(30, HEADS, DIM), noise(30, HEADS, seed=1), noise(700, DIM, seed=2)
    whole = indexer._scores(queries, shares, keys)
    for begin, end in ((0, 1), (4, 7), (29, 30)):
        for num_rows in (1, 5, 256, 257, 699):
            got = indexer._scores(queries[begin:end], shares[begin:end], keys[:num_rows])
            assert torch.equal(got, whole[begin:end, :num_rows])


class Case:
    """A sequence with keys in its blocks, and the attention inputs of its last `count` positions."""

    def __init__(self, layer: int, length: int = 60, count: int = 23) -> None:
        self.layer, self.source = layer, CONFIG.kv_source(layer)
        self.ratio = CONFIG.compress_ratios[layer]
        self.arena = open_arena(poisoned(4, 0), 4)
        state = SequenceState(CONFIG)
        state.blocks = [3, 1]
        self.keys = pack_fp4(noise(length // self.ratio, DIM, seed=5))
        self.arena.write("index", self.source, torch.tensor(state.blocks), 0, self.keys)
        self.span = Span(state, length - count, count, 0)
        self.latent, self.x = noise(count, CONFIG.q_lora_rank), noise(count, CONFIG.hidden_size, seed=1)
        self.rotation = Rotation(frequencies(CONFIG, compressed=True), self.span.positions)
        self.indexer = Indexer(CONFIG, weights(), layer, linear())

    def select(self) -> Tensor:
        self.indexer.select(self.latent, self.x, self.rotation, [self.span], self.arena)
        assert self.span.selected is not None
        return self.span.selected

    def scores(self) -> Tensor:
        """By the formula, minus infinity for what is not visible."""
        name = f"layers.{self.layer}.attn.indexer"
        queries = (self.latent @ weights().matrix(f"{name}.wq_b").right()).view(-1, HEADS, DIM)
        queries = round_fp4(self.rotation.apply(queries))
        shares = self.x @ weights().matrix(f"{name}.weights_proj").right() / (DIM * HEADS) ** 0.5
        dots = torch.einsum("nhd,rd->nhr", queries, unpack_fp4(self.keys, DIM)).relu()
        scores = (dots * shares[:, :, None]).sum(1)
        hidden = torch.arange(scores.shape[1]) >= (self.span.positions[:, None] + 1) // self.ratio
        return scores.masked_fill(hidden, -INF)


@pytest.mark.parametrize("layer", [PAIRED, SINGLE])
def test_each_position_selects_the_best_rows_it_may_see(layer: int) -> None:
    case = Case(layer)
    scores = case.scores()
    selected = case.select()
    assert selected.tolist() == [naive_best(row, CONFIG.index_topk) for row in scores.tolist()]


def test_later_layers_select_among_the_candidates_alone() -> None:
    case = Case(SINGLE)
    case.select()
    candidates, keys = case.span.candidates, case.span.keys
    assert candidates is not None and 0 < int(candidates.sum()) < candidates.numel()
    again = Case(AGAIN)
    again.span.candidates, again.span.keys = candidates, keys
    scores = again.scores()
    narrowed = again.select()
    want = [naive_best(row, CONFIG.index_topk) for row in scores.masked_fill(~candidates, -INF).tolist()]
    assert narrowed.tolist() == want
    assert want != [naive_best(row, CONFIG.index_topk) for row in scores.tolist()]


def test_the_first_position_sees_no_pair_and_its_own_single_row() -> None:
    assert Case(PAIRED, 1, 1).select().tolist() == [[-1] * CONFIG.index_topk]
    assert Case(SINGLE, 1, 1).select().tolist() == [[-1] * (CONFIG.index_topk - 1) + [0]]
