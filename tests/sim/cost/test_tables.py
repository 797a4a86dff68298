from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.step import GroupStep, Step, StepItem
from rackserve.sim.cost.load import load_of
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.cost.tables import StepTimes
from tests.sim.cost.models import flash

DECODE = flash("gb300", "decode", ep=2)
PREFILL = flash("vr", "prefill", ep=2)
DECODE_TIMES, PREFILL_TIMES = StepTimes(DECODE), StepTimes(PREFILL)


def decode_step(rank: int, count: int, context: int) -> Step:
    return Step(rank, tuple(StepItem(number, context, 1, b"", (), True, num_draft=5) for number in range(count)))


def prefill_step(rank: int, *chunks: tuple[int, int, bool]) -> Step:
    """Chunks of (start, tokens, whether the prompt ends there)."""
    items = (
        StepItem(number, start, count, b"", (), ends, full_from=max(start, start + count - 128) if ends else start + count)
        for number, (start, count, ends) in enumerate(chunks)
    )
    return Step(rank, tuple(items))


def exact(model: StepModel, *steps: Step) -> float:
    return model.seconds([load_of(step) for step in steps]) * 1e9


@given(st.integers(0, 300), st.integers(1000, 900_000))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_decode_steps_are_those_of_the_model(count: int, context: int) -> None:
    step = decode_step(0, count, context)
    assert DECODE_TIMES.step_ns(step) == pytest.approx(exact(DECODE, step), rel=0.005)


def test_carried_sequences_take_as_long_as_those_with_items() -> None:
    spelled, carried = decode_step(0, 20, 90_000), Step(0, (), carried=20, carried_context=20 * 90_000, carried_drafts=5)
    assert DECODE_TIMES.step_ns(carried) == DECODE_TIMES.step_ns(spelled)
    part = StepItem(0, 1000, 500, b"", (), True)
    assert DECODE_TIMES.step_ns(Step(0, (part,), carried=20, carried_context=20 * 90_000, carried_drafts=5)) == round(
        exact(DECODE, Step(0, (part, *decode_step(0, 20, 90_000).items)))
    )


CHUNKS = st.lists(st.tuples(st.integers(2000, 400_000), st.integers(1, 16_000), st.booleans()), min_size=0, max_size=4)


@given(CHUNKS)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_prefill_steps_are_those_of_the_model(chunks: list[tuple[int, int, bool]]) -> None:
    step = prefill_step(0, *chunks)
    assert PREFILL_TIMES.step_ns(step) == pytest.approx(exact(PREFILL, step), rel=0.015)


@given(CHUNKS, CHUNKS)
@settings(derandomize=True, max_examples=40, deadline=None)
def test_a_group_of_uneven_prefill_ranks_takes_what_the_model_says(
    one: list[tuple[int, int, bool]], other: list[tuple[int, int, bool]]
) -> None:
    steps = prefill_step(0, *one), prefill_step(1, *other)
    assert PREFILL_TIMES.group_ns(GroupStep(1, steps)) == pytest.approx(exact(PREFILL, *steps), rel=0.05)


def test_sequences_with_fewer_drafts_take_less_time() -> None:
    step = decode_step(0, 30, 80_000)
    fewer = Step(0, (*step.items[:20], *(msgspec.structs.replace(item, num_draft=0) for item in step.items[20:])))
    assert DECODE_TIMES.step_ns(fewer) == pytest.approx(exact(DECODE, fewer), rel=0.01)
    assert DECODE_TIMES.step_ns(fewer) < DECODE_TIMES.step_ns(step)


def test_a_group_of_uneven_decode_ranks_takes_what_the_model_says() -> None:
    steps = decode_step(0, 40, 100_000), decode_step(1, 3, 20_000)
    assert DECODE_TIMES.group_ns(GroupStep(1, steps)) == pytest.approx(exact(DECODE, *steps), rel=0.03)


@given(st.integers(0, 200), st.integers(0, 10**7))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_times_never_fall_with_more_sequences_or_context(count: int, total: int) -> None:
    def at(sequences: int, context: int) -> int:
        return DECODE_TIMES.step_ns(decode_step(0, sequences, context // max(sequences, 1)))

    assert at(count, total) <= at(count, total + 5000 * max(count, 1))
    assert at(count, total) <= at(count + 1, total + total // max(count, 1))


def test_a_decode_step_that_computes_part_of_a_prompt_is_asked_of_the_model() -> None:
    step = Step(0, (StepItem(0, 1000, 500, b"", (), True),))
    assert DECODE_TIMES.step_ns(step) == round(exact(DECODE, step))


def test_no_prefill_step_is_shorter_than_its_least_but_a_dummy_is() -> None:
    assert PREFILL_TIMES.step_ns(prefill_step(0, (2000, 1, False))) == 70_000_000
    assert PREFILL_TIMES.step_ns(Step(0, ())) < 10_000_000
