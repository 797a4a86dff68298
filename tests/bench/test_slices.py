from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.units import NS_PER_S, to_ns
from rackserve.bench import slices as slices_module
from rackserve.bench.records import RequestRecord
from rackserve.bench.slices import Slices, slices_of


def record(sent_s: float, chunks_s: tuple[float, ...], prompt: int = 10, cached: int = 4, output: int = 6) -> RequestRecord:
    chunks = tuple(to_ns(at) for at in chunks_s)
    first, last = (chunks[0], chunks[-1]) if chunks else (-1, -1)
    ended = chunks[-1] if chunks else to_ns(sent_s)
    return RequestRecord(
        "r", "s", 0, to_ns(sent_s), ended, prompt, output, first, last, prompt, cached, output,
        num_chunks=len(chunks), chunk_ns=chunks,
    )  # fmt: skip


def test_tokens_fall_into_the_second_in_which_they_came() -> None:
    found = slices_of([record(5.0, (5.5, 6.5, 6.9)), record(7.2, (8.1,), prompt=7, cached=0, output=1)])
    assert found == Slices(1, (4.0, 0.0, 0.0, 0.0), (6.0, 0.0, 0.0, 7.0), (2.0, 4.0, 0.0, 1.0))


def test_without_output_there_are_no_slices() -> None:
    assert slices_of([]) is None and slices_of([record(1.0, ())]) is None


def test_a_long_run_has_longer_slices() -> None:
    found = slices_of([record(0.0, (0.5,)), record(0.0, (float(4 * slices_module.MAX_SLICES),))])
    assert found is not None and found.seconds == 5
    assert len(found.output) == len(found.cached_input) <= slices_module.MAX_SLICES


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.lists(st.integers(0, 20_000), max_size=6), st.integers(0, 50)), max_size=8)
)
def test_slices_add_up_to_what_was_answered(drawn: list[tuple[int, list[int], int]]) -> None:
    """Against a count by walking every chunk of every slice."""
    records = [
        record(sent / 1e3, tuple(sorted((sent + later) / 1e3 for later in chunks)), 9, 2, out) for sent, chunks, out in drawn
    ]
    found, answered = slices_of(records), [each for each in records if each.chunk_ns]
    if found is None:
        assert not answered
        return
    zero = min(each.sent_ns for each in records)
    for number, value in enumerate(found.output):
        low, high = zero + number * NS_PER_S, zero + (number + 1) * NS_PER_S
        parts = [each.output_tokens / len(each.chunk_ns) for each in answered for at in each.chunk_ns if low <= at < high]
        assert abs(value - sum(parts)) < 1e-6
    assert sum(found.cached_input) == 2 * len(answered) and sum(found.uncached_input) == 7 * len(answered)
