"""Five hundred requests with one prompt in common, at once, on a rack that has never seen it."""

from __future__ import annotations

import pytest

from rackserve.base.events import StepDone
from rackserve.base.units import Time
from tests.nodes.rig import Rig, prompt

BLOCK = 32
PREFIX = 20 * BLOCK
HERD = 500


def herd(size: int, *, workers: int, pool: bool) -> tuple[dict[str, int], list[Time]]:
    """Prompt tokens computed by each prefill worker, and times to the first token, shortest first."""
    rig = Rig(
        block=BLOCK,
        topology={
            "prefill_workers": workers, "pool": pool, "prefill_blocks": 1000, "decode_blocks": 1000, "segment_blocks": 1000,
        },
        scheduler={"max_batched_tokens": 256, "max_sequences": HERD},
    )  # fmt: skip
    rig.host.after_event = lambda: None  # the laws are checked by other trials
    answers = [rig.submit(f"r{number}", [*prompt(PREFIX), number % 64], 1) for number in range(size)]
    rig.rest()
    assert all(answer.finish == "length" for answer in answers)
    computed: dict[str, int] = {}
    for step in rig.events_of(StepDone):
        if step.rank.worker.startswith("prefill"):
            computed[step.rank.worker] = computed.get(step.rank.worker, 0) + step.new_tokens
    return computed, sorted(answer.first - answer.sent for answer in answers)


@pytest.mark.parametrize(("workers", "pool"), [(1, False), (3, True)])
def test_a_prompt_that_a_herd_has_in_common_is_computed_once_by_each_worker(workers: int, pool: bool) -> None:
    computed, waits = herd(HERD, workers=workers, pool=pool)
    assert len(computed) == workers
    assert sum(computed.values()) == workers * PREFIX + HERD  # the prefix, and the last token of each
    _, (alone,) = herd(1, workers=workers, pool=pool)
    assert waits[HERD * 99 // 100] <= 2 * alone
