"""What the engine is told for sampling, once per sequence, and how its answers end a request."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from msgspec import structs

from rackserve.base.errors import InvariantError
from rackserve.base.request import Constraint, SamplingParams
from rackserve.base.step import CONSTRAINT_DEAD_END, ItemResult, Step, StepItem, StepResult, TokenLogprobs
from rackserve.digest_model import digest_layout
from rackserve.sched.sampling import describe, take
from rackserve.sched.sequence import Sequence, new_sequence
from tests.sched.desk import BLOCK, Desk, sequence_of

PENALTY = SamplingParams(presence_penalty=0.5)
REPEATS = SamplingParams(repetition_penalty=1.5)
DICTATED = SamplingParams(constraint=Constraint("json_object"))


def asking(num_tokens: int = 10, max_tokens: int = 4, output: int = 0, **fields: Any) -> Sequence:
    """A sequence whose last `output` tokens were delivered by an earlier attempt."""
    plain = sequence_of(1, num_tokens, max_tokens)
    request = structs.replace(plain.request, num_emitted=output, **fields)
    return new_sequence(1, request, plain.placement, "queued", max_tokens)


def ids(data: bytes) -> list[int]:
    return list(array("i", data))


def drawn(desk: Desk, *tokens: int, finish: str | None = None) -> StepItem:
    """Plan and finish a step of one sequence; its item."""
    step = desk.plan()
    assert step is not None
    (item,) = step.items
    desk.scheduler.apply(step, StepResult(0, (ItemResult(1, tokens if item.sample else (), finish=finish),)))
    return item


@pytest.mark.parametrize(
    ("sampling", "output", "wanted"),
    [
        (SamplingParams(temperature=1.0), 3, []),
        (SamplingParams(logit_bias=((1, 1.0),)), 3, []),
        (PENALTY, 0, []),
        (PENALTY, 3, [107, 108, 109]),
        (DICTATED, 1, [109]),
        (REPEATS, 0, list(range(100, 110))),
        (REPEATS, 3, list(range(100, 110))),
    ],
)
def test_the_first_item_that_samples_brings_the_tokens_that_the_choice_depends_on(
    sampling: SamplingParams, output: int, wanted: list[int]
) -> None:
    desk = Desk(max_batched_tokens=6, max_steps_in_flight=1)
    desk.add(asking(sampling=sampling, output=output))
    assert drawn(desk).context == b""  # a chunk
    first = drawn(desk, 7)
    assert (first.sample, first.output_index, ids(first.context)) == (True, output, wanted)
    assert drawn(desk, 8).context == b""


def test_a_decode_rank_is_told_the_first_token_too() -> None:
    sequence = asking(sampling=PENALTY, output=2)
    sequence.computed = sequence.scheduled = 10
    sequence.outputs.append(55)
    sequence.tokens.append(55)
    desk = Desk()
    desk.add(sequence, 11)
    item = drawn(desk, 7)
    assert (item.output_index, ids(item.context)) == (3, [108, 109, 55])


def test_a_request_without_token_ids_is_told_nothing() -> None:
    plain = sequence_of(1, 8)
    request = structs.replace(plain.request, tokens=b"", sampling=REPEATS, prompt_logprobs=2)
    assert not new_sequence(1, request, plain.placement, "queued", 4).asks


@pytest.mark.parametrize(("min_tokens", "ignore_eos", "told"), [(0, False, ()), (3, False, (5, 6)), (3, True, ())])
def test_stop_tokens_are_told_where_they_may_come_too_early(min_tokens: int, ignore_eos: bool, told: tuple[int, ...]) -> None:
    desk = Desk(max_batched_tokens=16)
    sampling = SamplingParams(min_tokens=min_tokens, presence_penalty=0.1)
    desk.add(asking(sampling=sampling, stop_token_ids=(5, 6), ignore_eos=ignore_eos))
    assert drawn(desk, 7).stop_token_ids == told


def test_a_prompt_is_scored_position_by_position_over_all_chunks_and_passes_all_layers() -> None:
    layout = digest_layout(BLOCK, replay=6, tail=True)
    desk = Desk(max_batched_tokens=4, max_steps_in_flight=1, model=layout)
    desk.add(asking(prompt_logprobs=2))
    items = [drawn(desk, 7) for _ in range(4)]
    assert [ids(item.scored) for item in items] == [[101, 102, 103, 104], [105, 106, 107, 108], [109], []]
    assert [item.scored_top for item in items[:3]] == [2, 2, 2]
    assert [item.full_from for item in items] == [0] * 4


def test_a_prompt_whose_output_has_begun_is_not_scored_again() -> None:
    desk = Desk(max_batched_tokens=16)
    desk.add(asking(prompt_logprobs=2, output=1))
    assert drawn(desk, 7).scored == b""


def test_scores_are_kept_until_they_are_reported() -> None:
    sequence, score = asking(prompt_logprobs=0), TokenLogprobs(-1.0, ())
    sequence.move("ready")
    sequence.move("running")
    for start in (0, 5):
        take(sequence, StepItem(1, start, 5, b"", (), False), ItemResult(1, (), prompt_logprobs=(score,) * 2), BLOCK)
    assert sequence.prompt_logprobs == [score] * 4


def running(max_tokens: int = 4, stop: tuple[int, ...] = ()) -> tuple[Sequence, StepItem]:
    sequence = sequence_of(1, 4, max_tokens, stop=stop)
    sequence.move("ready")
    sequence.move("running")
    return sequence, StepItem(1, 0, 4, b"", (), True)


@pytest.mark.parametrize(
    ("tokens", "finish", "accepted", "ends"),
    [
        ((7,), "stop", (7,), "stop"),
        ((), CONSTRAINT_DEAD_END, (), CONSTRAINT_DEAD_END),
        ((7, 8), CONSTRAINT_DEAD_END, (7, 8), CONSTRAINT_DEAD_END),
        ((7, 8, 9), "stop", (7, 8, 9), "stop"),  # complete with the last token that may be output
        ((7, 8, 9, 10), "stop", (7, 8, 9), "length"),  # complete only behind it
        ((7, 5, 9), CONSTRAINT_DEAD_END, (7, 5), "stop"),  # a stop token came before
        ((7,), None, (7,), None),
    ],
)
def test_what_the_engine_ends_is_ended_unless_a_stop_token_or_the_limit_came_first(
    tokens: tuple[int, ...], finish: str | None, accepted: tuple[int, ...], ends: str | None
) -> None:
    sequence, item = running(3, stop=(5,))
    assert take(sequence, item, ItemResult(1, tokens, finish=finish), BLOCK) == accepted
    assert (sequence.finish, sequence.outputs) == (ends, list(accepted))


def test_an_item_that_samples_yields_a_token_or_says_why_not() -> None:
    sequence, item = running()
    with pytest.raises(InvariantError, match="no token"):
        take(sequence, item, ItemResult(1, ()), BLOCK)


def test_a_step_planned_before_the_end_was_known_changes_nothing() -> None:
    desk = Desk(max_steps_in_flight=2)
    sequence = desk.add(asking(4, sampling=DICTATED))
    first, second = desk.plan(), desk.plan()
    assert first is not None and second is not None
    desk.scheduler.apply(first, StepResult(0, (ItemResult(1, (), finish=CONSTRAINT_DEAD_END),)))
    desk.scheduler.remove(sequence)
    progress, left = desk.scheduler.apply(second, StepResult(0, (ItemResult(1, (), finish=CONSTRAINT_DEAD_END),)))
    assert (progress, left, sequence.outputs) == ([], [sequence], [])
    assert isinstance(second, Step) and second.items[0].tokens == b""


def test_describing_leaves_everything_else_as_it_was() -> None:
    sequence = asking(sampling=PENALTY)
    item = StepItem(1, 0, 4, b"abcd", (1, 2), True, 0, PENALTY, logprobs=2, full_from=3)
    assert describe(item, sequence) == item
