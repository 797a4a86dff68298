from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.step import Step, StepItem
from rackserve.sim.cost.load import StepLoad, decode_load, load_of, prefill_load


def item(sequence: int, start: int, count: int, drafts: int = 0, full_from: int = 0) -> StepItem:
    return StepItem(sequence, start, count, b"", (), True, num_draft=drafts, full_from=full_from)


ITEMS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 5), st.integers(0, 70)), min_size=0, max_size=4
)


@given(ITEMS)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_the_sums_of_a_step_are_those_of_counting_position_by_position(drawn: list[tuple[int, int, int, int]]) -> None:
    tokens = tail = attended = context = 0
    for start, count, drafts, full_from in drawn:
        context += start
        for position in range(start, start + count + drafts):
            tokens += 1
            tail += position >= full_from
            attended += position + 1
    step = Step(0, tuple(item(number, *each) for number, each in enumerate(drawn)))
    assert load_of(step) == StepLoad(len(drawn), tokens, tail, context, attended)


def test_a_decode_load_is_that_of_a_step_of_alike_sequences() -> None:
    step = Step(0, tuple(item(number, 100, 1, drafts=5) for number in range(3)))
    assert decode_load(3, 300, 6) == load_of(step)


def test_a_prefill_load_is_that_of_one_chunk() -> None:
    assert prefill_load(20, 100) == load_of(Step(0, (item(0, 100, 20),)))
    assert prefill_load(20, 100, 4) == load_of(Step(0, (item(0, 100, 20, full_from=116),)))


def test_carried_sequences_count_like_items_that_go_on() -> None:
    spelled = Step(0, tuple(item(number, start, 1, drafts=5) for number, start in enumerate((100, 40, 7))))
    assert load_of(Step(0, (item(0, 100, 1, drafts=5),), carried=2, carried_context=47, carried_drafts=5)) == load_of(spelled)


def test_a_dummy_step_has_no_load() -> None:
    assert load_of(Step(0, ())) == StepLoad()
    assert StepLoad().mean_context == 0
