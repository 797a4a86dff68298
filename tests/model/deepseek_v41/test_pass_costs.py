"""Measured costs are positive and rise with the tokens of a pass, and the adaptive policy runs on them."""

from __future__ import annotations

from array import array
from itertools import pairwise

from rackserve.base.step import Step, StepItem
from rackserve.model.deepseek_v41.layout import kv_layout
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.runner import DeepseekV41Runner
from rackserve.model.files import GOLDEN_FOLDER, open_model


def test_costs_are_measured_before_the_first_step_and_never_fall_with_tokens() -> None:
    files = open_model(str(GOLDEN_FOLDER))
    layout = kv_layout(files.deepseek_v41, 32)
    runner = DeepseekV41Runner(
        files, memoryview(bytearray(4 * layout.block_bytes)), 4, 32, RunnerOptions(draft_policy="adaptive")
    )
    for table in (runner.costs.draft, runner.costs.verify):
        seconds = [table.at(count) for count in (1, 4, 16, 64)]
        assert seconds[0] > 0 and all(low <= high for low, high in pairwise(seconds))
    tokens = array("i", [5, 6, 7]).tobytes()
    runner.run(Step(0, (StepItem(1, 0, 3, tokens, (0, 1), True),)))
    done = runner.run(Step(0, (StepItem(1, 3, 1, b"", (), True, 1, num_draft=5),))).items[0]
    assert 0 <= done.num_verified <= 5 and 1 <= len(done.tokens) <= done.num_verified + 1
