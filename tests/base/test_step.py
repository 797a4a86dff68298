"""Steps count what they compute."""

from __future__ import annotations

import msgspec

from rackserve.base.step import GroupStep, Step, StepItem


def test_a_step_counts_the_positions_of_all_items() -> None:
    items = (StepItem(1, 0, 5, b"", (0, 1), False), StepItem(2, 9, 1, b"", (), True))
    assert Step(0, items).num_tokens == 6
    assert Step(0, ()).num_tokens == 0


def test_a_step_counts_what_attention_reads() -> None:
    items = (StepItem(1, 4, 3, b"", (0, 1), False), StepItem(2, 9, 1, b"", (), True))
    assert Step(0, items).context_tokens == 4 + 9
    assert Step(0, items).attended == (5 + 6 + 7) + 10


def test_a_group_step_comes_back_equal() -> None:
    step = GroupStep(3, (Step(0, (StepItem(1, 0, 2, b"\1\0\0\0\2\0\0\0", (4,), True, num_draft=2),), (9,)), Step(1, ())))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=GroupStep) == step
