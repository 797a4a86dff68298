from __future__ import annotations

from rackserve.live.step_times import StepTimes


def test_parts_are_told_in_seconds_in_the_order_of_the_metric() -> None:
    assert StepTimes(kernel=3_000_000_000, plan=500_000_000, wait=1).seconds == (3.0, 0.5, 1e-9)
