"""A setting outside its bounds is named with the bound it breaks."""

from __future__ import annotations

import math

import msgspec
import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.ranges import require_range


class Pair(msgspec.Struct, frozen=True):
    first: float = 1
    second: float = 1


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0.4, r"a\.second must be at least 0\.5, got 0\.4"),
        (8.1, r"a\.second must be at most 8, got 8\.1"),
        (math.nan, r"a\.second must be at least 0\.5, got nan"),
        (math.inf, r"a\.second must be at most 8, got inf"),
        (-math.inf, r"a\.second must be at least 0\.5, got -inf"),
        (1 << 70, r"a\.second must be at most 8, got a number of more than 64 bits"),
        (-(1 << 70), r"a\.second must be at least 0\.5, got a number of more than 64 bits"),
    ],
)
def test_what_is_out_of_range_is_named_with_the_bound(value: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        require_range("a", Pair(second=value), ("first", "second"), 0.5, 8)


@pytest.mark.parametrize("value", [0.5, 1, 8])
def test_both_bounds_are_allowed(value: float) -> None:
    require_range("a", Pair(second=value), ("first", "second"), 0.5, 8)


def test_only_what_is_named_is_looked_at() -> None:
    require_range("a", Pair(second=math.nan), ("first",), 0.5, 8)
