"""The digest model: any stale, missing, swapped or half-written entry changes the output."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError
from rackserve.base.request import Constraint, SamplingParams
from rackserve.base.step import UNSUPPORTED, Step, StepItem
from rackserve.digest_model import DigestRunner, cold_output, digest_layout

BLOCK = 4
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def runner(window: bool = False, num_blocks: int = 8, **model: Any) -> tuple[DigestRunner, bytearray]:
    layout = digest_layout(BLOCK, window=window, **model)
    arena = bytearray(num_blocks * layout.block_bytes + 4 * layout.window_bytes)
    return DigestRunner(memoryview(arena), num_blocks, layout), arena


def item(start: int, tokens: list[int], blocks: tuple[int, ...] = (), *, sample: bool = True, **more: Any) -> StepItem:
    return StepItem(1, start, len(tokens) or 1, array("i", tokens).tobytes(), blocks, sample, **more)


def ids(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def run(made: DigestRunner, part: StepItem, retired: tuple[int, ...] = ()) -> tuple[int, ...]:
    return made.run(Step(0, (part,), retired)).items[0].tokens


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=11), st.permutations(range(8)), st.booleans())
def test_output_depends_neither_on_chunks_nor_on_where_blocks_lie(chunks: list[int], table: list[int], window: bool) -> None:
    made, _ = runner(window)
    start, token = 0, ()
    for number, size in enumerate([*chunks, len(TOKENS)]):
        part = TOKENS[start : start + size]
        if part:
            last = start + len(part) == len(TOKENS)
            token = run(made, item(start, part, tuple(table) if number == 0 else (), sample=last))
            start += len(part)
    assert list(token) == cold_output(ids(TOKENS), 1, window=window)


@pytest.mark.parametrize("spoiled", range(len(TOKENS) - 1))
def test_every_entry_matters(spoiled: int) -> None:
    made, arena = runner()
    run(made, item(0, TOKENS[:-1], (5, 2, 7), sample=False))
    block = (5, 2, 7)[spoiled // BLOCK]
    arena[(block * BLOCK + spoiled % BLOCK) * 8] ^= 1
    assert list(run(made, item(len(TOKENS) - 1, TOKENS[-1:]))) != cold_output(ids(TOKENS), 1)


def test_swapped_blocks_matter() -> None:
    made, _ = runner()
    run(made, item(0, TOKENS[:8], (0, 1, 2), sample=False))
    assert run(made, StepItem(2, 8, 3, ids(TOKENS[8:]), (1, 0, 2), True)) != tuple(cold_output(ids(TOKENS), 1))


def test_a_resume_state_that_is_not_restored_matters() -> None:
    made, _ = runner(window=True)
    run(made, item(0, TOKENS[:8], (0, 1, 2), sample=False, snapshot=3))
    cold = tuple(cold_output(ids(TOKENS), 1, window=True))
    for restore, equal in ((3, True), (-1, False), (2, False)):
        part = StepItem(5 + restore, 8, 3, ids(TOKENS[8:]), (0, 1, 2), True, restore=restore)
        assert (run(made, part) == cold) == equal


def test_the_engine_goes_on_from_the_token_it_drew_itself() -> None:
    made, _ = runner()
    drawn = [*run(made, item(0, TOKENS, (0, 1, 2, 3)))]
    for step in range(3):
        drawn += run(made, item(len(TOKENS) + step, [], output_index=1 + step))
    assert drawn == cold_output(ids(TOKENS), 4)


@pytest.mark.parametrize("window", [False, True])
def test_accepted_drafts_are_the_tokens_that_would_have_been_drawn(window: bool) -> None:
    made, _ = runner(window)
    drawn, most = [*run(made, item(0, TOKENS, tuple(range(8))))], 1
    while len(drawn) < 12:
        tokens = run(made, item(len(TOKENS) + len(drawn) - 1, drawn[-1:], output_index=len(drawn), num_draft=3))
        drawn += tokens
        most = max(most, len(tokens))
    assert most > 1
    assert drawn == cold_output(ids(TOKENS), len(drawn), window=window)


def test_a_seeded_draw_depends_on_seed_and_position_alone() -> None:
    seeded = SamplingParams(temperature=1.0, seed=5)
    again = cold_output(ids(TOKENS), 6, sampling=seeded)
    assert again == cold_output(ids(TOKENS), 6, sampling=seeded)
    assert again != cold_output(ids(TOKENS), 6, sampling=SamplingParams(temperature=1.0, seed=6))
    assert cold_output(ids(TOKENS), 6) == cold_output(ids(TOKENS), 6, sampling=SamplingParams(seed=6))


def test_a_stop_token_is_the_last_one() -> None:
    whole = cold_output(ids(TOKENS), 6)
    assert cold_output(ids(TOKENS), 6, stop=(whole[2],)) == whole[: whole.index(whole[2]) + 1]


def output_with(**sampling: Any) -> list[int]:
    return cold_output(ids(TOKENS), 6, stop=sampling.pop("stop", ()), sampling=SamplingParams(**sampling))


def test_bans_hold_and_a_full_bias_forces() -> None:
    whole = output_with()
    assert set(output_with(allowed_token_ids=(5, 7))) == {5, 7}
    assert output_with(logit_bias=((9, 100.0),)) == [9] * 6
    assert whole[0] not in output_with(logit_bias=((whole[0], -100.0),))
    assert whole[0] not in output_with(bad_words=((whole[0],),))
    assert output_with(logit_bias=((whole[0], 1.0),)) == whole


def test_stop_tokens_do_not_come_before_min_tokens() -> None:
    stop = tuple(range(60))
    assert len(output_with(stop=stop)) == 1
    late = output_with(stop=stop, min_tokens=4)
    assert set(late[:4]) <= {60, 61, 62, 63}
    assert len(late) == 5


@pytest.mark.parametrize("sampling", [SamplingParams(presence_penalty=1.0), SamplingParams(repetition_penalty=2.0)])
def test_a_choice_that_depends_on_the_output_is_the_same_wherever_it_goes_on(sampling: SamplingParams) -> None:
    whole = cold_output(ids(TOKENS), 6, sampling=sampling)
    assert whole[0] != cold_output(ids(TOKENS), 1)[0]
    made, _ = runner()
    given = TOKENS + whole[:3]
    context = ids(given if sampling.reads_prompt else whole[:3])
    part = item(0, given, tuple(range(5)), output_index=3, sampling=sampling, context=context)
    assert list(run(made, part)) == whole[3:4]
    made, _ = runner()
    wrong = item(0, given, tuple(range(5)), output_index=3, sampling=sampling, context=context[:-4] + b"1234")
    assert list(run(made, wrong)) != whole[3:4]
    made, _ = runner()
    with pytest.raises(InvariantError, match="of 3 output tokens are known"):
        run(made, item(0, given, tuple(range(5)), output_index=3, sampling=sampling))


def test_what_needs_logits_ends_the_request() -> None:
    made, _ = runner()
    dictated = SamplingParams(constraint=Constraint("json_object"))
    parts = (
        item(0, TOKENS, (0, 1, 2), sampling=dictated),
        StepItem(2, 0, 3, ids(TOKENS[:3]), (3,), False, scored=ids(TOKENS[1:4])),
    )
    assert [(done.tokens, done.finish) for done in made.run(Step(0, parts)).items] == [((), UNSUPPORTED)] * 2


def test_a_retired_sequence_is_forgotten() -> None:
    made, _ = runner()
    run(made, item(0, TOKENS, (0, 1, 2)))
    run(made, StepItem(9, 0, 1, ids([1]), (6,), True), retired=(1,))
    assert list(run(made, item(0, TOKENS, (3, 4, 5)))) == cold_output(ids(TOKENS), 1)


def test_an_arena_too_small_is_refused() -> None:
    with pytest.raises(InvariantError, match="8 blocks need"):
        DigestRunner(memoryview(bytearray(10)), 8, digest_layout(BLOCK))


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(
    ("given", "equal"), [(TOKENS[5:8], True), (TOKENS[6:8], False), ([], False), ([*TOKENS[6:8], 0], False)]
)
def test_the_ids_before_the_first_item_matter(given: list[int], equal: bool, window: bool) -> None:
    model: dict[str, Any] = {"window": window, "history": 3}
    made, _ = runner(**model)
    run(made, item(0, TOKENS[:8], (0, 1, 2), sample=False, snapshot=3 if window else -1))
    part = StepItem(2, 8, 3, ids(TOKENS[8:]), (0, 1, 2), True, restore=3 if window else -1, history=ids(given))
    assert (list(run(made, part)) == cold_output(ids(TOKENS), 1, **model)) == equal


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("replay", [1, 2, 5])
def test_computing_the_last_positions_again_brings_the_state_back(replay: int, tail: bool) -> None:
    model: dict[str, Any] = {"history": 2, "replay": replay, "tail": tail}
    cold = cold_output(ids(TOKENS), 1, **model)
    for again, rewritten, equal in ((replay, False, True), (replay - 1, False, False), (replay, True, False)):
        made, arena = runner(**model)
        run(made, item(0, TOKENS[:8], (0, 1, 2), sample=False))
        before = bytes(arena)
        start = 8 - again
        part = StepItem(
            2, start, 11 - start, ids(TOKENS[start:]), (0, 1, 2), True, history=ids(TOKENS[max(0, start - 2) : start]),
            replayed=0 if rewritten else again, full_from=11 - replay if tail else 0,
        )  # fmt: skip
        assert (list(run(made, part)) == cold) == equal, (again, rewritten)
        if not rewritten:
            assert bytes(arena)[: 8 * 8] == before[: 8 * 8]


def test_a_position_that_did_not_pass_all_layers_matters_to_tokens_but_not_to_entries() -> None:
    model: dict[str, Any] = {"replay": 3, "tail": True}
    outputs, arenas = [], []
    for full_from in (0, 8, 9):
        made, arena = runner(**model)
        outputs.append(run(made, item(0, TOKENS, (0, 1, 2), full_from=full_from)))
        arenas.append(bytes(arena))
    assert outputs[0] == outputs[1] != outputs[2]
    assert arenas[0] == arenas[1] == arenas[2]


def test_a_state_is_stored_where_it_is_asked_for_or_not_at_all() -> None:
    """Drafts may pass the place or not; a state before it or behind it would be another one."""
    history = [*TOKENS, *cold_output(ids(TOKENS), 12, window=True)]
    stored = 0
    for start in range(len(TOKENS), len(TOKENS) + 8):
        for ahead in range(1, 5):
            made, arena = runner(window=True)
            run(made, item(0, history[:start], tuple(range(8)), sample=False))
            place = slice(8 * 32 + 3 * 16, 8 * 32 + 4 * 16)
            drawn = run(made, item(start, history[start : start + 1], num_draft=3, snapshot=3, snapshot_at=start + ahead))
            reached = len(drawn) >= ahead
            made.run(
                Step(0, (StepItem(2, 0, start + ahead, ids(history[: start + ahead]), (7, 6, 5, 4, 3, 2), False, snapshot=2),))
            )
            right = arena[8 * 32 + 2 * 16 : 8 * 32 + 3 * 16]
            assert arena[place] == (right if reached else bytes(16))
            stored += reached
    assert 8 < stored < 32


def test_all_drafts_asked_for_are_verified() -> None:
    made, _ = runner()
    run(made, item(0, TOKENS[:-1], tuple(range(8)), sample=False))
    result = made.run(Step(0, (item(len(TOKENS) - 1, TOKENS[-1:], num_draft=3),))).items[0]
    assert result.num_verified == 3 >= len(result.tokens) - 1
