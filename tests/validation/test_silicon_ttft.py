from __future__ import annotations

import pytest

from rackserve.architectures import architecture_named
from rackserve.sim.cost.load import prefill_load
from rackserve.validation.mixed_time import MixedTime
from rackserve.validation.silicon_ttft import closed_loop_ttft


@pytest.fixture(scope="module")
def time() -> MixedTime:
    return MixedTime(architecture_named("llama-3.1-8b"), "h100")


def test_one_request_at_a_time_never_waits(time: MixedTime) -> None:
    assert closed_loop_ttft(time, 1, 1_000, 20) == pytest.approx(time.prompt_seconds(prefill_load(1_000)), rel=1e-6)


def test_requests_that_come_at_once_wait_for_each_other(time: MixedTime) -> None:
    alone = closed_loop_ttft(time, 1, 4_000, 20)
    crowd = [closed_loop_ttft(time, many, 4_000, 20) for many in (4, 16)]
    assert alone < crowd[0] < crowd[1]


def test_only_the_first_rush_waits_for_all_prompts(time: MixedTime) -> None:
    rush = time.prompt_in_chunks(8 * 4_000, 8_192)
    assert time.prompt_in_chunks(4_000, 8_192) < closed_loop_ttft(time, 8, 4_000, 400) < rush
