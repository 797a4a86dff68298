from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.validation.agreement import agreement, kendall_tau


def test_errors_have_their_size_and_sign() -> None:
    found = agreement([8, 11, 30], [10, 10, 20])
    assert found.count == 3
    assert found.median_error == pytest.approx(0.2)
    assert found.median_signed == pytest.approx(0.1)
    assert found.share_low == pytest.approx(1 / 3)


def test_the_same_order_is_one_and_the_opposite_minus_one() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)


def test_ties_say_nothing() -> None:
    assert kendall_tau([1, 1, 1], [1, 2, 3]) is None
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == 1


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=8))
@settings(derandomize=True, max_examples=50, deadline=None)
def test_scaling_predictions_leaves_their_order(values: list[float]) -> None:
    measured = [value**0.5 + at for at, value in enumerate(values)]
    assert kendall_tau(values, measured) == kendall_tau([2 * value for value in values], measured)
