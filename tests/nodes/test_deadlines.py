"""Waits are positive, and outer ones cover inner ones."""

from __future__ import annotations

import pytest

from rackserve.base.errors import ConfigError
from rackserve.nodes.deadlines import Deadlines


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_deadline_must_be_positive(value: float) -> None:
    with pytest.raises(ConfigError, match=r"deadlines\.fence"):
        Deadlines(fence=value)


@pytest.mark.parametrize(
    ("inner", "outer"), [("queue", "silence"), ("lookup", "queue"), ("retry", "unavailable"), ("handover", "receive")]
)
def test_an_inner_wait_may_not_outlast_the_outer_one(inner: str, outer: str) -> None:
    with pytest.raises(ConfigError, match=rf"deadlines\.{inner} must not exceed deadlines\.{outer}"):
        Deadlines(**{inner: getattr(Deadlines(), outer) + 1})


def test_all_deadlines_are_those_asked_for_one_by_one() -> None:
    deadlines = Deadlines(queue=3.5)
    assert deadlines.all_ns() == {name: deadlines.ns(name) for name in Deadlines.__struct_fields__}
    assert deadlines.all_ns()["queue"] == 3_500_000_000
