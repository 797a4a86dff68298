from __future__ import annotations

import math

import pytest

from rackserve.api.limits import Limits
from rackserve.base.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("body_bytes", (0, 2**41)),
        ("messages", (0, 2**31)),
        ("choices", (0, 2**31)),
        ("preparing", (0, 2**31)),
        ("tenant_requests", (0, 2**31)),
        ("threads", (0, 1025)),
        ("body_s", (0.0, math.nan, math.inf)),
        ("send_s", (-1.0, math.nan, 1e300)),
    ],
)
def test_limits_that_let_nothing_or_everything_through_are_refused(name: str, wrong: tuple[float, ...]) -> None:
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"limits\.{name} must be at"):
            Limits(**{name: value})
