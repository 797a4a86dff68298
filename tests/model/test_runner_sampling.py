"""What a Llama rank draws by every field of a request, beside a page of plain Python over the same logits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.request import Constraint, SamplingParams
from rackserve.base.rng import draw_unit
from rackserve.base.step import CONSTRAINT_DEAD_END, CONSTRAINT_INVALID, UNSUPPORTED, ItemResult, StepItem
from rackserve.model.attention import Span
from rackserve.model.files import ModelFiles
from rackserve.model.llama import LlamaWeights
from rackserve.model.sampler import token_logprobs
from tests.model.naive_sampling import compile_words, naive_law, one_of
from tests.model.test_runner import BLOCK_TOKENS, Rank, prompt_of

VOCAB, LENGTH = 96, 6
STOPS = (5, 60)


class Ranks:
    """Makes ranks over the tiny model that can hold words, and gives the logits of any ids."""

    def __init__(self, files: ModelFiles, weights: LlamaWeights) -> None:
        self._files, self._weights = files, weights
        self._llama = self.rank().runner._llama

    def rank(self) -> Rank:
        return Rank(self._files, self._weights, compile_constraint=compile_words)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab], all in one pass without a cache."""
        hidden = self._llama.forward(torch.tensor(ids), [Span(range(100), 0, len(ids))])
        return self._llama.logits(hidden, torch.arange(len(ids)))

    def naive(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        """Up to LENGTH tokens of output."""
        output: list[int] = []
        filtered = sampling.top_k or sampling.top_p < 1
        while len(output) < LENGTH:
            law = naive_law(self.logits(prompt + output)[-1].tolist(), sampling, prompt, output, STOPS)
            if not sum(law):
                break
            order = sorted(range(VOCAB), key=lambda token: (-law[token], token)) if filtered else list(range(VOCAB))
            left, unit = 0.0, draw_unit("sample", sampling.seed, len(output))
            at = next(at for at, token in enumerate(order) if (left := left + law[token]) > unit)
            output.append(order[at])
        return output


@pytest.fixture(scope="module")
def ranks(tiny_files: ModelFiles, tiny_weights: LlamaWeights) -> Ranks:
    return Ranks(tiny_files, tiny_weights)


WORDS = [[(seed * 7 + at * at * 5 + at) % VOCAB for at in range(LENGTH)] for seed in range(60)]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, min_p=0.2, seed=1),
    SamplingParams(temperature=0.7, presence_penalty=1.5, frequency_penalty=0.5, seed=2),
    SamplingParams(repetition_penalty=1.8),
    SamplingParams(temperature=1.2, repetition_penalty=1.3, frequency_penalty=-0.5, top_p=0.8, seed=3),
    SamplingParams(logit_bias=((3, 4.0), (50, -100.0))),
    SamplingParams(temperature=1.0, allowed_token_ids=(1, 5, 9, 60, 61), min_tokens=3, seed=4),
    SamplingParams(temperature=1.5, bad_words=((7,), (1, 2)), seed=5),
    SamplingParams(temperature=2.0, constraint=one_of(*WORDS), seed=6),
    SamplingParams(constraint=one_of(*WORDS), presence_penalty=0.5, logit_bias=((WORDS[3][0], 9.0),)),
]


def asked(sampling: SamplingParams, prompt: list[int], output: list[int], **fields: Any) -> dict[str, Any]:
    """Fields of a sequence's first item that samples."""
    known = [*(prompt if sampling.reads_prompt else ()), *output] if sampling.reads_output else []
    ids = array("i", known).tobytes()
    stops = STOPS if sampling.min_tokens else ()
    return {"sampling": sampling, "output_index": len(output), "context": ids, "stop_token_ids": stops} | fields


def with_blocks(item: StepItem, blocks: tuple[int, ...]) -> StepItem:
    return StepItem(**{name: getattr(item, name) for name in item.__struct_fields__} | {"new_blocks": blocks + item.new_blocks})


@settings(derandomize=True, max_examples=30, deadline=None)
@given(data=st.data())
def test_output_is_the_naive_one_over_chunks_neighbours_hand_overs_and_retries(data: st.DataObject, ranks: Ranks) -> None:
    """Each request is prefilled on one rank, goes on on another, and may be placed again there after some tokens."""
    prefill, decode = ranks.rank(), ranks.rank()
    chosen = data.draw(st.lists(st.sampled_from(SAMPLINGS), min_size=1, max_size=3))
    prompts = [prompt_of(number, data.draw(st.integers(1, 40))) for number in range(len(chosen))]
    outputs: list[list[int]] = []
    for number, (sampling, prompt) in enumerate(zip(chosen, prompts, strict=True)):
        cut = data.draw(st.integers(0, len(prompt) - 1))
        if cut:
            prefill.run(prefill.item(number, 0, prompt[:cut], False, sampling=sampling))
        neighbour = prefill.item(90 + number, 0, prompt_of(8, 9), True, **asked(SAMPLINGS[2], prompt_of(8, 9), []))
        item = prefill.item(number, cut, prompt[cut:], True, **asked(sampling, prompt, []))
        outputs.append(list(prefill.run(neighbour, item)[1].tokens))
    names = {number: number for number in range(len(chosen))}
    fresh = set(names)
    while max(len(output) for output in outputs) < LENGTH:
        items = []
        for number, (sampling, prompt, output) in enumerate(zip(chosen, prompts, outputs, strict=True)):
            if number not in fresh and data.draw(st.integers(0, 3)) == 0:  # another attempt, from what was delivered
                decode.run(retired=(names[number],))
                names[number] += 10
                fresh.add(number)
            whole, table = prompt + output, ()
            if names[number] == number and number in fresh:
                table = decode.adopt(number, prefill, prefill.tables[number])
            start = 0 if number in fresh and names[number] >= 10 else len(whole) - 1
            tokens = whole[start:] if number in fresh else None
            more = asked(sampling, prompt, output) if number in fresh else {"sampling": sampling, "output_index": len(output)}
            if sampling.min_tokens:
                more["stop_token_ids"] = STOPS
            items.append(with_blocks(decode.item(names[number], start, tokens, True, **more), table))
            fresh.discard(number)
        for output, result in zip(outputs, decode.run(*items), strict=True):
            output += result.tokens
    for sampling, prompt, output in zip(chosen, prompts, outputs, strict=True):
        assert output == ranks.naive(prompt, sampling), sampling


@pytest.mark.parametrize("sampling", SAMPLINGS[1:])
def test_every_field_changes_the_output(sampling: SamplingParams, ranks: Ranks) -> None:
    prompt = prompt_of(3, 30)
    kept = ("temperature", "top_p", "seed") if sampling.changes_logits else ("temperature", "seed")
    plain = SamplingParams(**{name: getattr(sampling, name) for name in kept})
    assert ranks.naive(prompt, sampling) != ranks.naive(prompt, plain)


def drawn(rank: Rank, item: StepItem) -> ItemResult:
    return rank.run(item)[0]


def test_output_ends_with_its_constraint_and_a_step_planned_before_harms_nobody(ranks: Ranks) -> None:
    rank, prompt = ranks.rank(), prompt_of(2, 9)
    sampling = SamplingParams(constraint=one_of([4, 10]))
    first = drawn(rank, rank.item(1, 0, prompt, True, **asked(sampling, prompt, [])))
    last = drawn(rank, rank.item(1, 9, None, True, sampling=sampling, output_index=1))
    assert [(result.tokens, result.finish) for result in (first, last)] == [((4,), None), ((10,), "stop")]
    late = rank.item(1, 10, None, True, sampling=sampling, output_index=2)
    other, done = rank.run(rank.item(2, 0, prompt, True), late)
    assert (done.tokens, done.finish) == ((), "stop")
    assert list(other.tokens) == ranks.naive(prompt, SamplingParams())[:1]


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        (SamplingParams(constraint=one_of([4]), allowed_token_ids=(5,)), CONSTRAINT_DEAD_END),
        (SamplingParams(constraint=Constraint("regex", "a+")), CONSTRAINT_INVALID),
    ],
)
def test_a_request_that_cannot_go_on_ends_alone(sampling: SamplingParams, finish: str, ranks: Ranks) -> None:
    rank, prompt = ranks.rank(), prompt_of(2, 9)
    bad = rank.item(1, 0, prompt, True, logprobs=2, **asked(sampling, prompt, []))
    done, other = rank.run(bad, rank.item(2, 0, prompt, True))
    assert (done.tokens, done.logprobs, done.finish) == ((), (), finish)
    assert len(other.tokens) == 1
    late = rank.item(1, 9, None, True, sampling=sampling, output_index=1)
    assert drawn(rank, late).finish == finish


def test_without_a_compiler_a_constraint_is_unsupported(tiny_files: ModelFiles, tiny_weights: LlamaWeights) -> None:
    rank, sampling = Rank(tiny_files, tiny_weights), SamplingParams(constraint=one_of([4]))
    assert drawn(rank, rank.item(1, 0, [1, 2], True, **asked(sampling, [], []))).finish == UNSUPPORTED


def test_log_probabilities_are_those_before_anything_is_changed(ranks: Ranks) -> None:
    rank, prompt = ranks.rank(), prompt_of(2, 9)
    sampling = SamplingParams(temperature=0.5, top_k=1, logit_bias=((7, 100.0),))
    done = drawn(rank, rank.item(1, 0, prompt, True, logprobs=3, **asked(sampling, prompt, [])))
    assert done.tokens == (7,)
    assert done.logprobs == (token_logprobs(ranks.logits(prompt)[-1], 7, 3),)


@pytest.mark.parametrize("cuts", [(), (1,), (70,), (5, 6, 8, 120), tuple(range(1, 130, 9))])
def test_a_prompt_has_the_same_scores_however_it_is_cut(cuts: tuple[int, ...], ranks: Ranks) -> None:
    rank, prompt = ranks.rank(), prompt_of(4, 3 * BLOCK_TOKENS + 1 + 120)
    found = []
    for start, end in zip((0, *cuts), (*cuts, len(prompt)), strict=True):
        scored = array("i", prompt[start + 1 : end + 1]).tobytes()
        item = rank.item(1, start, prompt[start:end], end == len(prompt), scored=scored, scored_top=2)
        other = rank.item(2, start, prompt_of(7, end - start), True)
        found += rank.run(other, item)[1].prompt_logprobs
    rows = ranks.logits(prompt)
    assert found == [token_logprobs(rows[at], token, 2) for at, token in enumerate(prompt[1:])]
