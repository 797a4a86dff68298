from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.keys import CacheNamespace, extend_chain
from rackserve.bench.ideal import IdealCache
from tests.bench.toys import ids

ROOT = CacheNamespace("m", "r", 2, "l").root()


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=12))
def test_hits_are_the_longest_prefix_any_earlier_prompt_had(prompts: list[list[int]]) -> None:
    cache = IdealCache(2)
    seen: list[list[int]] = []
    for prompt in prompts:
        naive = 0
        for old in seen:
            shared = next((n for n, (a, b) in enumerate(zip(old, prompt, strict=False)) if a != b), min(len(old), len(prompt)))
            naive = max(naive, shared // 2 * 2)
        while naive >= len(prompt):
            naive -= 2
        assert cache.add_prompt(extend_chain(b"", ROOT, ids(*prompt), 2), len(prompt)) == naive
        seen.append(prompt)


def test_trace_blocks_hit_within_their_play_only() -> None:
    cache = IdealCache(2)
    assert cache.add_trace_blocks("a/0", ids(1, 2, 3)) == 0
    assert cache.add_trace_blocks("a/0", ids(1, 2, 4)) == 2
    assert cache.add_trace_blocks("a/0", ids(1, 2, 3)) == 3
    assert cache.add_trace_blocks("a/1", ids(1, 2, 3)) == 0
