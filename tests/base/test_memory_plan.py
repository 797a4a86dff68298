from __future__ import annotations

import pytest

from rackserve.base.errors import ResourceError
from rackserve.base.memory_plan import Line, MemoryPlan


def test_the_batch_that_fits_is_the_sum_made_by_hand() -> None:
    """1,000 bytes of weights, 8 bytes of KV a token, 0.9 of 2,000 bytes usable, 100 of activations, sequences of 50 tokens."""
    lines = (Line("weights", 1000, "use less"), Line("activations", 100, "lower the batch"))
    plan, usable = MemoryPlan("device", lines), int(0.9 * 2000)
    assert plan.num_more(usable, 50 * 8) == 1
    assert plan.num_more(usable, 50 * 16) == 0
    assert plan.num_more(2000, 50 * 8) == 2
    sharded = MemoryPlan("device", (lines[0], Line("table", 800, "add shards"), lines[1]))
    assert sharded.num_more(usable, 50 * 8) == 0
    with pytest.raises(
        ResourceError, match=r"device: no room for activations: 100 bytes, but 0 of 1,800 are left; lower the batch"
    ):
        sharded.require_fit(usable)


def test_a_plan_that_fits_to_the_byte_fits_and_one_byte_less_does_not() -> None:
    plan = MemoryPlan("device", (Line("weights", 700, "use less"), Line("cache", 300, "keep less")))
    assert plan.total_bytes == 1000
    plan.require_fit(1000)
    with pytest.raises(ResourceError, match="device: no room for cache: 300 bytes, but 299 of 999 are left; keep less"):
        plan.require_fit(999)
    assert plan.num_more(900, 1) == 0
