"""Token budget -> step, beside a naive model of what each sequence still needs."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.kv_layout import KvLayout
from rackserve.base.step import Step
from rackserve.digest_model import digest_layout
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sched.sequence import Sequence
from tests.sched.desk import BLOCK, Desk, sequence_of


def tokens_of(step: Step | None) -> dict[int, tuple[int, int]]:
    """sequence -> (start, number of positions)."""
    return {item.sequence: (item.start, item.num_tokens) for item in step.items} if step else {}


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    desk = Desk(max_batched_tokens=8, max_steps_in_flight=1)
    desk.add(sequence_of(1, 20))
    chunks = []
    for _ in range(3):
        step = desk.plan()
        assert step is not None
        chunks.append((tokens_of(step)[1], step.items[0].sample))
        desk.finish(step)
    assert chunks == [((0, 8), False), ((8, 8), False), ((16, 4), True)]


def test_sequences_that_generate_come_before_prompts() -> None:
    desk = Desk(max_batched_tokens=8)
    desk.add(sequence_of(1, 4))
    first = desk.plan()
    assert first is not None
    desk.finish(first)
    desk.add(sequence_of(2, 30))
    assert tokens_of(desk.plan()) == {1: (4, 1), 2: (0, 7)}


def test_a_second_step_in_flight_continues_where_the_first_will_end() -> None:
    desk = Desk(max_batched_tokens=8, max_steps_in_flight=2)
    desk.add(sequence_of(1, 12, 3))
    first, second = desk.plan(), desk.plan()
    third = desk.plan()
    assert [tokens_of(step) for step in (first, second, third)] == [{1: (0, 8)}, {1: (8, 4)}, {1: (12, 1)}]
    assert third is not None
    assert third.items[0].tokens == b""  # the engine itself knows the token it drew last
    assert third.items[0].output_index == 1


def test_no_more_positions_are_planned_than_output_tokens_are_wanted() -> None:
    desk = Desk(max_steps_in_flight=2)
    desk.add(sequence_of(1, 4, 2))
    first, second = desk.plan(), desk.plan()
    assert desk.plan() is None
    assert first is not None and second is not None
    assert [part.tokens for part in desk.finish(first)] == [(7,)]
    (last,) = desk.finish(second)
    assert (last.tokens, last.first_output, last.sequence.finish) == ((7,), 1, "length")


def test_results_behind_a_stop_token_are_thrown_away() -> None:
    desk = Desk(max_steps_in_flight=2)
    sequence = desk.add(sequence_of(1, 4, 9, stop=(7,)))
    first, second = desk.plan(), desk.plan()
    assert first is not None and second is not None
    desk.finish(first, token=7)
    assert (sequence.finish, sequence.outputs) == ("stop", [7])
    assert desk.finish(second, token=8) == []
    assert (sequence.outputs, sequence.holds, sequence.in_flight) == ([7], 0, 0)


def test_a_stop_token_among_accepted_drafts_ends_there() -> None:
    desk = Desk(max_steps_in_flight=1, num_draft=3)
    sequence = desk.add(sequence_of(1, 4, 9, stop=(8,)))
    first = desk.plan()
    assert first is not None and first.items[0].num_draft == 0  # nothing is drafted before the first token
    desk.finish(first)
    step = desk.plan()
    assert step is not None and step.items[0].num_draft == 3
    desk.finish(step, token=8, num_accepted=3)
    assert (sequence.outputs, sequence.finish, sequence.computed) == ([7, 8], "stop", 5)


def test_drafts_never_exceed_what_may_still_be_output_or_the_budget() -> None:
    desk = Desk(max_batched_tokens=3, max_steps_in_flight=1, num_draft=5)
    desk.add(sequence_of(1, 2, 4))
    first = desk.plan()
    assert first is not None
    desk.finish(first)
    drafts = []
    while (step := desk.plan()) is not None:
        drafts.append(step.items[0].num_draft)
        (progress,) = desk.finish(step)
        if progress.sequence.finish:
            desk.scheduler.remove(progress.sequence)
    assert drafts == [2, 1, 0]


def test_the_last_sampled_token_is_not_computed_and_so_never_cached() -> None:
    desk = Desk(max_steps_in_flight=1)
    sequence = desk.add(sequence_of(1, 7, 1))
    step = desk.plan()
    assert step is not None
    desk.finish(step)
    assert (sequence.num_known, sequence.computed) == (8, 7)


def test_the_youngest_sequence_gives_its_blocks_to_an_older_one() -> None:
    desk = Desk(num_blocks=4, max_steps_in_flight=1)
    old, young = desk.add(sequence_of(1, 8, 20)), desk.add(sequence_of(2, 7, 20))
    preempted: list[Sequence] = []
    for _ in range(4):
        step, gone = desk.scheduler.plan()
        preempted += gone
        if step is not None:
            desk.finish(step)
    assert preempted == [young]
    assert (young.state, old.state) == ("preempted", "ready")


def test_a_sequence_alone_on_a_full_rank_is_preempted_and_not_planned_for_ever() -> None:
    desk = Desk(num_blocks=2, max_steps_in_flight=1)
    sequence = desk.add(sequence_of(1, 8, 20))
    step = desk.plan()
    assert step is not None
    desk.finish(step)
    step, gone = desk.scheduler.plan()
    assert (step, gone) == (None, [sequence])


def test_retired_sequences_are_named_once_and_only_if_the_engine_knows_them() -> None:
    desk = Desk(max_steps_in_flight=1)
    known, unknown, other = desk.add(sequence_of(1, 4)), sequence_of(2, 4), sequence_of(3, 4)
    step = desk.plan()
    assert step is not None
    desk.finish(step)
    desk.add(unknown)
    for sequence in (known, unknown):
        sequence.move("aborted")
        desk.scheduler.remove(sequence)
    desk.add(other)
    step = desk.plan()
    assert step is not None and step.retired == (1,)
    assert desk.scheduler.dummy().retired == ()


def test_chunks_end_where_a_resume_state_is_stored() -> None:
    desk = Desk(window=True, max_batched_tokens=64, max_steps_in_flight=1)
    sequence = desk.add(sequence_of(1, 2 * BLOCK + 3))
    first = desk.plan()
    assert first is not None
    assert (tokens_of(first), first.items[0].snapshot) == ({1: (0, 2 * BLOCK)}, sequence.boundary_slot)
    assert sequence.stored == []  # not before the step has ended
    desk.finish(first)
    assert sequence.stored == [(2, sequence.boundary_slot)]
    second = desk.plan()
    assert second is not None
    assert (tokens_of(second), second.items[0].snapshot) == ({1: (2 * BLOCK, 3)}, sequence.end_slot)


def test_a_resume_state_is_restored_once() -> None:
    desk = Desk(window=True, max_steps_in_flight=1)
    sequence = desk.add(sequence_of(1, 12))
    sequence.restore = 5
    restores = []
    for _ in range(2):
        step = desk.plan()
        assert step is not None
        restores.append(step.items[0].restore)
        desk.finish(step)
    assert restores == [5, -1]


def test_an_engine_that_forgets_a_token_is_noticed() -> None:
    desk = Desk(max_steps_in_flight=1)
    desk.add(sequence_of(1, 4))
    step = desk.plan()
    assert step is not None
    with pytest.raises(InvariantError, match="no token"):
        desk.finish(step, num_accepted=0)


def test_announcing_more_than_is_computed_is_noticed() -> None:
    desk = Desk(max_steps_in_flight=1)
    sequence = desk.add(sequence_of(1, 8))
    assert sequence.lease is not None
    assert desk.plan() is not None
    desk.cache.commit(sequence.lease, sequence.chain, 1)
    with pytest.raises(InvariantError, match="too early"):
        desk.scheduler.check()


OPS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 6)),
    st.tuples(st.just("plan"), st.just(0), st.just(0)),
    st.tuples(st.just("finish"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 5), st.just(0)),
)


@settings(derandomize=True, max_examples=120, deadline=None)
@given(st.lists(OPS, max_size=40), st.integers(1, 9), st.integers(1, 2), st.booleans())
def test_positions_are_computed_once_in_order_and_within_budget(
    ops: list[tuple[str, int, int]], budget: int, in_flight: int, drafts: bool
) -> None:
    """The model: position -> how often planned, per sequence; every position of a finished sequence exactly once."""
    in_flight = 1 if drafts else in_flight
    desk = Desk(num_blocks=400, max_batched_tokens=budget, max_steps_in_flight=in_flight, num_draft=2 if drafts else 0)
    flying: list[Step] = []
    model: dict[int, int] = {}  # sequence -> next position to plan
    live: dict[int, Sequence] = {}
    for name, number, more in ops:
        if name == "add":
            sequence = desk.add(sequence_of(len(model) + 1, number, more))
            model[sequence.number], live[sequence.number] = 0, sequence
        elif name == "plan" and len(flying) < in_flight:
            wanted = {n for n, s in live.items() if desk.scheduler.pending(s) > 0}
            step = desk.plan()
            assert (step is None) == (not wanted)
            if step is None:
                continue
            flying.append(step)
            assert sum(item.num_tokens + item.num_draft for item in step.items) <= budget
            for item in step.items:
                assert item.start == model[item.sequence]
                model[item.sequence] = item.start + item.num_tokens
        elif name == "finish" and flying:
            for progress in desk.finish(flying.pop(0), num_accepted=number):
                sequence = progress.sequence
                assert len(sequence.outputs) <= sequence.max_outputs
                model[sequence.number] = max(model[sequence.number], sequence.computed)
                if sequence.finish is not None:
                    assert sequence.computed == sequence.num_known - 1
                    desk.scheduler.remove(live.pop(sequence.number))
        elif name == "abort" and number in live:
            desk.scheduler.remove(live[number])
            live.pop(number).move("aborted")


@pytest.mark.parametrize(
    ("settings_", "name"),
    [
        ({"max_batched_tokens": 0}, "max_batched_tokens"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_steps_in_flight": 3}, "max_steps_in_flight"),
        ({"num_draft": -1, "max_steps_in_flight": 1}, "num_draft"),
        ({"num_draft": 2}, "num_draft"),
        ({"order": "random"}, "order"),
    ],
)
def test_settings_out_of_range_are_refused(settings_: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler\.{name}"):
        SchedulerConfig(**settings_)  # type: ignore[arg-type]


# ------------------------------------------------------------ resume state, history and drafts


def window_desk(num_draft: int = 0, *, model: KvLayout | None = None, **config: int) -> Desk:
    return Desk(window=True, model=model, max_steps_in_flight=1, num_draft=num_draft, **({"max_batched_tokens": 64} | config))


def run_to_output(desk: Desk, sequence: Sequence) -> None:
    """Compute the prompt; the sequence then generates."""
    while not sequence.outputs:
        step = desk.plan()
        assert step is not None
        desk.finish(step)


def test_a_prompt_also_stops_where_others_part_from_it() -> None:
    desk = window_desk()
    sequence = desk.add(sequence_of(1, 6 * BLOCK))
    sequence.branches = {2: 20, 5: 21}
    seen = []
    while not sequence.outputs:
        step = desk.plan()
        assert step is not None
        seen.append((step.items[0].start, step.items[0].num_tokens, step.items[0].snapshot, step.items[0].snapshot_at))
        desk.finish(step)
    assert seen == [(0, 8, 20, 8), (8, 12, 21, 20), (20, 4, sequence.boundary_slot, 24)]
    assert (sequence.stored, sequence.branched, sequence.branches) == (
        [(2, 20), (5, 21), (6, sequence.boundary_slot)],
        [2, 5],
        {},
    )


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=14), st.integers(0, 9), st.integers(0, 30))
def test_the_last_boundary_of_the_output_has_its_state_whatever_is_accepted(
    prompt: int, accepted: list[int], num_draft: int, stop_after: int
) -> None:
    """The model: slot -> boundary it holds, written when a run of accepted tokens passes the place asked for, stop or not."""
    desk = window_desk(num_draft)
    sequence = desk.add(sequence_of(1, prompt, 200, stop=(9,)))
    run_to_output(desk, sequence)
    held: dict[int, int] = {}
    for number in accepted:
        step = desk.plan()
        assert step is not None
        (item,) = step.items
        reached = item.start + 1 + min(number, item.num_draft + 1) - 1
        if item.snapshot >= 0:
            assert item.start < item.snapshot_at <= item.start + 1 + item.num_draft and item.snapshot_at % BLOCK == 0
            if reached >= item.snapshot_at:
                held[item.snapshot] = item.snapshot_at
        ends = len(sequence.outputs) + number > stop_after
        tokens = [7] * number
        if ends:
            tokens[max(0, stop_after - len(sequence.outputs)) :] = [9] * number
        desk.finish_with(step, tokens[: item.num_draft + 1])
        last = sequence.computed // BLOCK
        if last * BLOCK > prompt:
            assert sequence.boundary == last and held[sequence.state_slot(last)] == last * BLOCK
        if sequence.finish:
            break


def test_drafts_do_not_reach_past_a_second_boundary() -> None:
    desk = window_desk(9)
    sequence = desk.add(sequence_of(1, 3, 200))
    run_to_output(desk, sequence)
    step = desk.plan()
    assert step is not None
    assert (step.items[0].start, step.items[0].num_draft, step.items[0].snapshot_at) == (3, 3, 4)  # 3..6, and 8 is a boundary


def test_without_stored_state_drafts_know_no_boundary() -> None:
    desk = window_desk(9, model=digest_layout(BLOCK, replay=6))
    sequence = desk.add(sequence_of(1, 3, 200))
    run_to_output(desk, sequence)
    step = desk.plan()
    assert step is not None
    assert (step.items[0].num_draft, step.items[0].snapshot, step.items[0].snapshot_at) == (9, -1, -1)


def test_the_first_item_alone_carries_the_ids_before_it() -> None:
    for start, before in ((0, []), (1, [100]), (5, [102, 103, 104])):
        desk = Desk(model=digest_layout(BLOCK, history=3), max_batched_tokens=2, max_steps_in_flight=1)
        sequence = desk.add(sequence_of(1, 8))
        sequence.computed = sequence.scheduled = start
        histories = []
        for _ in range(2):
            step = desk.plan()
            assert step is not None
            histories.append(list(array("i", step.items[0].history)))
            desk.finish(step)
        assert histories == [before, []]


def test_a_request_without_tokens_has_no_history() -> None:
    desk = Desk(model=digest_layout(BLOCK, history=3), max_steps_in_flight=1)
    sequence = sequence_of(1, 8)
    sequence.tokens = array("i")
    desk.add(sequence, num_tokens=8)
    sequence.computed = sequence.scheduled = 5
    step = desk.plan()
    assert step is not None and step.items[0].history == b""


def test_positions_of_shared_blocks_are_marked_in_each_chunk() -> None:
    desk = Desk(model=digest_layout(BLOCK, replay=6), max_batched_tokens=4, max_steps_in_flight=1)
    sequence = desk.add(sequence_of(1, 14))
    sequence.computed = sequence.scheduled = 2
    sequence.replay_end = 8
    seen = []
    while not sequence.outputs:
        step = desk.plan()
        assert step is not None
        seen.append((step.items[0].start, step.items[0].replayed))
        desk.finish(step)
    assert seen == [(2, 4), (6, 2), (10, 0)]
    assert sequence.num_present == 14


def test_only_the_tail_of_a_prompt_passes_all_layers() -> None:
    desk = Desk(model=digest_layout(BLOCK, replay=3, tail=True), max_batched_tokens=4, max_steps_in_flight=1)
    desk.add(sequence_of(1, 10))
    seen = []
    for _ in range(4):
        step = desk.plan()
        assert step is not None
        seen.append((step.items[0].start, step.items[0].full_from))
        desk.finish(step)
    assert seen == [(0, 7), (4, 7), (8, 7), (10, 0)]
