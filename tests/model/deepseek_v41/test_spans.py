from __future__ import annotations

import torch

from rackserve.model.deepseek_v41.spans import Span, positions_of, tails
from rackserve.model.deepseek_v41.state import SequenceState
from tests.model.deepseek_v41.golden import CONFIG


def span(start: int, count: int, first: int, replayed: int = 0, full_from: int = 0) -> Span:
    state = SequenceState(CONFIG)
    state.blocks = [4, 2]
    return Span(state, start, count, first, replayed, full_from)


def test_a_span_names_its_positions_rows_and_blocks() -> None:
    one = span(5, 3, 10)
    assert (one.end, one.rows, one.positions.tolist(), one.blocks.tolist()) == (8, slice(10, 13), [5, 6, 7], [4, 2])
    assert positions_of([one, span(0, 2, 13)]).tolist() == [5, 6, 7, 0, 1]
    assert positions_of([]).tolist() == []


def test_a_compressed_row_is_visible_from_its_last_token_on() -> None:
    one = span(0, 6, 0)
    assert one.visible(1).tolist() == [1, 2, 3, 4, 5, 6]
    assert one.visible(2).tolist() == [0, 1, 1, 2, 2, 3]


def test_tails_keep_the_positions_that_pass_all_layers() -> None:
    spans = [span(0, 4, 0, full_from=2), span(8, 3, 4, full_from=20), span(6, 2, 7, replayed=1), span(3, 3, 9, 2, 4)]
    for one in spans:
        one.selected = one.positions[:, None]
    kept, rows = tails(spans)
    assert [(one.start, one.count, one.first, one.replayed) for one in kept] == [(2, 2, 0, 0), (6, 2, 2, 1), (4, 2, 4, 1)]
    assert rows.tolist() == [2, 3, 7, 8, 10, 11]
    assert torch.equal(positions_of(kept), positions_of(spans)[rows])
    for one in kept:
        assert one.selected is not None and torch.equal(one.selected[:, 0], one.positions)


def test_nothing_may_be_left() -> None:
    kept, rows = tails([span(0, 4, 0, full_from=4)])
    assert kept == [] and rows.tolist() == []
