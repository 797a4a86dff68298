from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.runs.eviction import EVICTION_ORDERS, LazyHeap


def test_orders_never_fall_when_a_run_is_used_again() -> None:
    for order in EVICTION_ORDERS.values():
        assert order(5, 2) < order(6, 2) <= order(6, 3)


def test_lru_goes_by_last_use_and_lfu_by_number_of_uses() -> None:
    often_but_old, once_but_new = (3, 9), (7, 1)
    assert EVICTION_ORDERS["lru"](*often_but_old) < EVICTION_ORDERS["lru"](*once_but_new)
    assert EVICTION_ORDERS["lfu"](*often_but_old) > EVICTION_ORDERS["lfu"](*once_but_new)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "use", "pop"]), st.integers(0, 5)), max_size=60))
def test_the_heap_pops_what_a_scan_would_find(ops: list[tuple[str, int]]) -> None:
    """Naive model: a dictionary of filed items and a scan for the smallest place."""
    age = {item: 10 * item for item in range(6)}
    heap: LazyHeap[int] = LazyHeap(lambda item: (age[item], item))
    filed: set[int] = set()
    for op, item in ops:
        if op == "add":
            heap.add(item)
            filed.add(item)
        elif op == "discard":
            heap.discard(item)
            filed.discard(item)
        elif op == "use":
            age[item] += 13
        else:
            fit = filed - {item}
            first = min(fit, key=lambda other: (age[other], other), default=None)
            assert heap.pop(fit.__contains__) == first
            filed = {other for other in filed if other in heap}
            assert filed >= fit - {first}
        assert all((other in heap) == (other in filed) for other in range(6))


def test_discarded_entries_do_not_pile_up() -> None:
    heap: LazyHeap[int] = LazyHeap(lambda item: (item, 0))
    for number in range(10_000):
        heap.add(number)
        if number >= 10:
            heap.discard(number)
    assert len(heap._heap) < 200
    assert [heap.pop(lambda item: True) for _ in range(11)] == [*range(10), None]
