"""Time is whole nanoseconds; blocks are rounded up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.units import NS_PER_S, blocks_for, to_ns, to_seconds


def test_seconds_become_whole_nanoseconds_and_back() -> None:
    assert to_ns(0.0000000015) == 2
    assert to_ns(1.5) == 1_500_000_000
    assert to_seconds(NS_PER_S // 4) == 0.25


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 64))
def test_blocks_hold_all_tokens_and_none_is_empty(num_tokens: int, block_tokens: int) -> None:
    blocks = blocks_for(num_tokens, block_tokens)
    assert blocks * block_tokens >= num_tokens > (blocks - 1) * block_tokens or blocks == num_tokens == 0
