from __future__ import annotations

import pytest

from rackserve.architectures import architecture_named
from rackserve.base.step import Step, StepItem
from rackserve.sim.cost.load import prefill_load
from rackserve.validation.mixed_time import MixedTime


@pytest.fixture(scope="module")
def time() -> MixedTime:
    return MixedTime(architecture_named("llama-3.1-8b"), "h200")


def item(number: int, start: int, num_tokens: int) -> StepItem:
    return StepItem(number, start, num_tokens, b"", (), True)


def test_a_mixed_step_takes_what_both_its_parts_take(time: MixedTime) -> None:
    decode, prompt = item(1, 500, 1), item(2, 0, 300)
    alone = time.seconds(Step(0, (decode,))) + time.seconds(Step(0, (prompt,)))
    assert time.seconds(Step(0, (decode, prompt))) == pytest.approx(alone)
    assert time.seconds(Step(0, (prompt,))) == pytest.approx(time.prompt_seconds(prefill_load(300)))


def test_a_given_rate_scales_prompts_alone(time: MixedTime) -> None:
    scaled = MixedTime(architecture_named("llama-3.1-8b"), "h200", prompt_scale=0.5)
    assert scaled.prompt_rate(4_096) == pytest.approx(2 * time.prompt_rate(4_096))
    assert scaled.seconds(Step(0, (item(1, 500, 1),))) == time.seconds(Step(0, (item(1, 500, 1),)))


def test_a_prompt_in_passes_takes_more_than_at_once_for_its_weights_are_read_again(time: MixedTime) -> None:
    assert time.prompt_in_chunks(4_096, 512) > time.prompt_in_chunks(4_096, 4_096) == time.prompt_seconds(prefill_load(4_096))


def test_more_chips_hold_more_tokens(time: MixedTime) -> None:
    pair = MixedTime(architecture_named("llama-3.1-8b"), "h200", tp=2)
    assert pair.num_blocks(16) > 2 * time.num_blocks(16) > 0
