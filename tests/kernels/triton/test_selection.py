from __future__ import annotations

import pytest
import torch

from rackserve.base.errors import InvariantError
from rackserve.model.deepseek_v41.indexer import best
from tests.kernels.triton.drawn import fenced, noise

selection = pytest.importorskip("rackserve.kernels.triton.selection")

INF = float("inf")


@pytest.fixture(autouse=True)
def _small_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short rows of scores already take several, the last one partly."""
    monkeypatch.setattr(selection, "SCAN", 64)


def tied(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Few different values of either sign, zeros of both signs, and some that may not be chosen."""
    scores = (noise(rows, width, seed=seed) * 2).round() / 2
    scores[noise(rows, width, seed=seed + 1) > 1] = -INF
    scores[noise(rows, width, seed=seed + 2) > 1.5] = -0.0
    return fenced(scores)


@pytest.mark.parametrize(("width", "count"), [(1, 5), (7, 1), (64, 70), (150, 5), (150, 70)])
def test_it_chooses_what_the_reference_chooses_also_among_equals(width: int, count: int) -> None:
    scores = torch.cat([tied(2, width), noise(1, width), torch.full((1, width), -INF), torch.zeros(1, width)])
    scores[1, width // 2] = INF
    assert torch.equal(selection.select(fenced(scores), count).long(), best(scores, count))


def test_scores_of_every_size_are_told_apart() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 130), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    scores = bits.int().view(torch.float32)
    scores = torch.where(scores.isnan(), torch.tensor(-INF), scores)
    near = 1 + torch.arange(130) % 3 * 2.0**-23
    assert torch.equal(selection.select(scores, 40).long(), best(scores, 40))
    assert torch.equal(selection.select(near[None], 90).long(), best(near[None], 90))


def test_scores_of_blocks_give_numbers_of_rows() -> None:
    blocks = fenced(torch.tensor([[-1, 2, 5, 9], [0, 1, 2, 3]], dtype=torch.int32))
    scores = tied(2, 12)
    scores[0, :3] = -INF
    numbers = blocks.repeat_interleave(3, 1) * 3 + torch.arange(3).repeat(4)
    wanted = best(scores, 7)
    rows = torch.where(wanted >= 0, numbers.long().gather(1, wanted.clamp(min=0)), -1)
    assert torch.equal(selection.select(scores, 7, blocks, 3).long(), rows)


def test_nothing_to_choose_from_and_wrong_shapes() -> None:
    assert torch.equal(selection.select(torch.empty(2, 0), 3), torch.full((2, 3), -1, dtype=torch.int32))
    assert selection.select(torch.empty(0, 5), 3).shape == (0, 3)
    with pytest.raises(InvariantError, match="blocks name 2 x 2 rows, scores 5"):
        selection.select(torch.zeros(1, 5), 1, torch.zeros(1, 2, dtype=torch.int32), 2)
