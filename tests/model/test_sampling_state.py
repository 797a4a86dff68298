"""Logits as a request wants them, beside a page of plain Python, after every token taken and taken back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import InvariantError, RequestError
from rackserve.base.request import Constraint, SamplingParams
from rackserve.base.step import CONSTRAINT_DEAD_END, CONSTRAINT_INVALID, UNSUPPORTED, StepItem
from rackserve.model.sampler import probabilities, sample
from rackserve.model.sampling_state import SamplingState, SamplingStates
from tests.model.naive_sampling import WordMatcher, compile_words, naive_law, one_of, words_of

VOCAB = 11


def packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def first_item(
    sampling: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = (), stops: tuple[int, ...] = ()
) -> StepItem:
    """The item that a sequence's state is made from."""
    known = [*(prompt if sampling.reads_prompt else ()), *output] if sampling.reads_output else []
    fields: dict[str, Any] = {"sampling": sampling, "context": packed(known), "stop_token_ids": stops}
    return StepItem(1, 0, 4, b"", (), True, len(output), **fields)


def state_of(sampling: SamplingParams, *more: Any) -> SamplingState:
    return SamplingState(first_item(sampling, *more), VOCAB, compile_words)


IDS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(IDS, min_size=9, max_size=9), min_size=1, max_size=30)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.7]),
    top_k=st.sampled_from([0, 3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.6]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 3), st.sampled_from([-100.0, -1.5, 2.5]), max_size=3).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    min_tokens=st.integers(0, 3),
    allowed_token_ids=st.one_of(st.just(()), st.sets(IDS, min_size=4).map(lambda ids: tuple(sorted(ids)))),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    constraint=st.one_of(st.none(), st.none(), WORDS.map(lambda words: one_of(*words))),
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(data=st.data(), sampling=PARAMS, prompt=st.lists(IDS, max_size=4))
def test_the_law_is_that_of_plain_python_after_every_token_taken_and_taken_back(
    data: st.DataObject, sampling: SamplingParams, prompt: list[int]
) -> None:
    stops, output = (2, 5), list[int]()
    state = state_of(sampling, prompt, output, stops)
    for index in range(8):
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
        logits = torch.randn(VOCAB, generator=generator) * 3
        want = naive_law(logits.tolist(), sampling, prompt, output, stops)
        edited = state.edit(logits)
        if edited is None:
            assert (state.finish, sum(want)) == (CONSTRAINT_DEAD_END, 0.0)
            return
        assert probabilities(edited, sampling).tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)
        assert want[sample(edited, sampling, index)] > 0
        before = logits.clone()
        back = data.draw(st.integers(0, 2)) if len(output) > 1 else 0
        likely = [token for token, share in enumerate(want) if share > 0]
        output.append(data.draw(st.sampled_from(likely)))
        state.push(output[-1])
        assert torch.equal(logits, before)
        if back:
            state.pop(back)
            del output[-back:]
        fresh = state_of(sampling, prompt, output, stops)  # as on another rank
        again, there = state.edit(before), fresh.edit(before)
        assert (again is None, state.finish) == (there is None, fresh.finish)
        assert again is None or (there is not None and torch.equal(again, there))
        if again is None:
            return


LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0, -0.5, 0.2, 0.1, -2.0])


def edited(sampling: SamplingParams, *more: Any) -> list[float]:
    found = state_of(sampling, *more).edit(LOGITS)
    assert found is not None
    return found.tolist()


def test_each_parameter_does_what_it_says() -> None:
    plain = LOGITS.tolist()
    minus = float("-inf")
    assert edited(SamplingParams(presence_penalty=0.5), (), (3, 3))[3] == 1.0
    assert edited(SamplingParams(frequency_penalty=0.5), (), (3, 3))[3] == 0.5
    repeated = edited(SamplingParams(repetition_penalty=2.0), (0, 1), (3,))
    assert repeated[:4] == [1.0, -2.0, 0.5, 0.75]
    assert edited(SamplingParams(presence_penalty=0.5), (0, 1), ()) == plain  # the prompt counts for repetition alone
    assert edited(SamplingParams(logit_bias=((1, 5.0), (VOCAB, 9.0)))) == [2.0, 4.0, *plain[2:]]
    assert edited(SamplingParams(allowed_token_ids=(2, 99)))[:4] == [minus, minus, 0.5, minus]
    banned = SamplingParams(bad_words=((4,), (6, 7), (3, 3, 8)))
    assert edited(banned, (), (1, 6)) == [minus if token in (4, 7) else value for token, value in enumerate(plain)]
    assert edited(banned, (), (3, 3)) == [minus if token in (4, 8) else value for token, value in enumerate(plain)]
    early = SamplingParams(min_tokens=2)
    assert edited(early, (), (1,), (0, 5, 99)) == [minus if token in (0, 5) else value for token, value in enumerate(plain)]
    assert edited(early, (), (1, 1), (0, 5)) == plain


def test_a_constraint_leaves_what_it_allows_and_ends_the_output_when_it_is_fulfilled() -> None:
    sampling = SamplingParams(constraint=one_of([4, 10], [4, 7, 1]))
    state = state_of(sampling)
    assert [token for token, share in enumerate(probabilities_of(state, sampling)) if share] == [4]
    state.push(4)
    assert [token for token, share in enumerate(probabilities_of(state, sampling)) if share] == [7]
    state.push(10)
    assert (state.finish, state.edit(LOGITS)) == ("stop", None)
    state.pop(1)
    assert state.finish is None and state.edit(LOGITS) is not None


def probabilities_of(state: SamplingState, sampling: SamplingParams) -> list[float]:
    found = state.edit(LOGITS)
    assert found is not None
    shares: list[float] = probabilities(found, sampling).tolist()
    return shares


@pytest.mark.parametrize(
    ("sampling", "output", "finish"),
    [
        (SamplingParams(constraint=one_of([4, 7]), allowed_token_ids=(3,)), (), CONSTRAINT_DEAD_END),
        (SamplingParams(constraint=one_of([4, 99])), (4,), CONSTRAINT_DEAD_END),
        (SamplingParams(constraint=one_of([4, 7])), (5,), CONSTRAINT_DEAD_END),  # never drawn so; still of no harm to others
        (SamplingParams(allowed_token_ids=(99,)), (), CONSTRAINT_DEAD_END),
        (SamplingParams(constraint=Constraint("regex", "a")), (), CONSTRAINT_INVALID),
        (SamplingParams(constraint=one_of([4, 7])), (4, 7), "stop"),
    ],
)
def test_where_nothing_may_follow_the_request_ends_and_says_why(
    sampling: SamplingParams, output: tuple[int, ...], finish: str
) -> None:
    state = state_of(sampling, (), output)
    assert (state.edit(LOGITS), state.finish) == (None, finish)
    assert (state.edit(LOGITS), state.finish) == (None, finish)


def test_without_a_compiler_a_constraint_is_unsupported() -> None:
    state = SamplingState(first_item(SamplingParams(constraint=one_of([4]))), VOCAB, None)
    assert (state.edit(LOGITS), state.finish) == (None, UNSUPPORTED)


def test_a_constraint_that_turns_out_to_take_too_much_ends_its_request_also_where_a_draft_found_out() -> None:
    class Costly(WordMatcher):
        def mask(self) -> bytes:
            if len(self.taken) == 2:
                raise RequestError("too much work")
            return super().mask()

    item = first_item(SamplingParams(constraint=one_of([4, 7, 1])))
    state = SamplingState(item, VOCAB, lambda constraint: Costly(words_of(constraint)))
    for token in (4, 7):
        assert state.edit(LOGITS) is not None
        state.push(token)
    assert (state.edit(LOGITS), state.finish) == (None, CONSTRAINT_INVALID)
    state.pop(2)
    assert (state.edit(LOGITS), state.finish) == (None, CONSTRAINT_INVALID)


@pytest.mark.parametrize("popped", [0, 1])
def test_so_does_one_that_takes_too_much_when_a_token_is_taken_in(popped: int) -> None:
    class Costly(WordMatcher):
        def accept(self, token: int) -> None:
            if len(self.taken) == 1:
                raise RequestError("too much work")
            super().accept(token)

        def rollback(self, num_tokens: int) -> None:
            raise RequestError("nothing can be taken back any more")

    item = first_item(SamplingParams(constraint=one_of([4, 7, 1])))
    state = SamplingState(item, VOCAB, lambda constraint: Costly(words_of(constraint)))
    for token in (4, 7):
        assert state.edit(LOGITS) is not None
        state.push(token)
    state.pop(popped)
    assert (state.edit(LOGITS), state.finish) == (None, CONSTRAINT_INVALID)


def test_tokens_that_were_not_sent_are_missed() -> None:
    item = StepItem(7, 0, 1, b"", (), True, 2, SamplingParams(presence_penalty=1.0), context=packed([3]))
    with pytest.raises(InvariantError, match="sequence 7: 1 of 2 output tokens"):
        SamplingState(item, VOCAB, None)


def test_states_are_kept_by_sequence_until_it_is_retired() -> None:
    states, sampling = SamplingStates(VOCAB), SamplingParams(presence_penalty=1.0)
    first = StepItem(1, 0, 1, b"", (), True, sampling=sampling, context=packed([3]), output_index=1)
    state = states.of(first)
    later = StepItem(1, 1, 1, b"", (), True, sampling=sampling, output_index=2)
    assert state is not None and states.of(later) is state
    assert states.of(StepItem(2, 0, 1, b"", (), False, sampling=sampling)) is None  # a chunk draws nothing
    assert states.of(StepItem(3, 0, 1, b"", (), True, sampling=SamplingParams(temperature=1.0, top_p=0.5))) is None
    states.forget(1)
    assert states.of(first) is not state


def test_a_word_list_is_read_as_written() -> None:
    assert words_of(one_of([1, 2], [3])) == [[1, 2], [3]]
