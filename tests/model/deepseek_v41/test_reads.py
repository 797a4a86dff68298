from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.deepseek_v41.golden import CONFIG, Bench, prompt

IDS = prompt("medium")


def whole(bench: Bench, layer: int) -> Tensor:
    """The rows of a whole prompt, from its start."""
    return bench.reads([IDS], [[]]).rows(layer)


@pytest.mark.parametrize("layer", CONFIG.engram_layer_ids)
def test_rows_of_pieces_are_those_of_the_whole(bench: Bench, layer: int) -> None:
    want = whole(bench, layer)
    assert want.shape == (len(IDS), CONFIG.engram_columns * CONFIG.engram_head_dim)
    for at in range(1, 9):
        got = bench.reads([IDS[at : at + 1], IDS[at + 1 :]], [IDS[max(0, at - 3) : at], IDS[max(0, at - 2) : at + 1]]).rows(
            layer
        )
        assert torch.equal(got, want[at:])


@pytest.mark.parametrize("layer", CONFIG.engram_layer_ids)
def test_each_of_the_last_ids_matters_and_earlier_ones_do_not(bench: Bench, layer: int) -> None:
    want = whole(bench, layer)[10:11]
    for back in range(1, 4):
        history = IDS[7:10]
        history[-back] = (history[-back] + 1) % CONFIG.vocab_size
        assert not torch.equal(bench.reads([IDS[10:11]], [history]).rows(layer), want)
    assert torch.equal(bench.reads([IDS[10:11]], [[0, *IDS[7:10]]]).rows(layer), want)


@pytest.mark.parametrize("layer", CONFIG.engram_layer_ids)
def test_drafts_follow_their_own_item(bench: Bench, layer: int) -> None:
    want = whole(bench, layer)
    reads = bench.reads([IDS[:3], IDS[20:21], IDS[40:42]], [[], IDS[17:20], IDS[37:40]])
    reads.extend([[], IDS[21:26], IDS[42:43]])
    assert torch.equal(reads.rows(layer), torch.cat((want[:3], want[20:26], want[40:43])))


def test_without_drafts_nothing_more_is_read(bench: Bench) -> None:
    reads = bench.reads([IDS[:3]], [[]])
    reads.extend([[]])
    assert len(reads.rows(CONFIG.engram_layer_ids[0])) == 3


def test_no_rows_are_no_mistake(bench: Bench) -> None:
    reads = bench.reads([], [])
    reads.extend([])
    assert len(reads.rows(CONFIG.engram_layer_ids[0])) == 0
