from __future__ import annotations

from rackserve.base.costs import StepCost


def test_each_count_has_its_price_and_a_step_takes_time() -> None:
    cost = StepCost(1000, 100, 10, 1, 0.5)
    assert cost.duration_ns(1, 2, 3, 4) == 1000 + 100 + 20 + 3 + 2
    assert StepCost(0, 0, 0, 0, 0).duration_ns(1, 1, 1, 1) == 1
