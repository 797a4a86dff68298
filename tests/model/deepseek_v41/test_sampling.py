"""Draws by every field of a request, with and without drafts, beside a page of plain Python over the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rackserve.base.request import SamplingParams
from rackserve.base.step import CONSTRAINT_DEAD_END, UNSUPPORTED
from rackserve.model.deepseek_v41.dspark import Drafting
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.runner import DeepseekV41Runner
from rackserve.model.sampler import token_logprobs
from rackserve.model.sampling_state import SamplingState, SamplingStates
from tests.model.deepseek_v41.golden import CONFIG, Bench, cut, ids_of, item, prompt, run, table
from tests.model.naive_sampling import compile_words, naive_law, one_of

IDS, BLOCK, VOCAB, LENGTH = prompt("short"), CONFIG.dspark_block_size, CONFIG.vocab_size, 8
WORDS = [[(seed * 11 + at * at * 3) % VOCAB for at in range(LENGTH)] for seed in range(40)]
GREEDY = [
    SamplingParams(presence_penalty=3.0, frequency_penalty=2.0),
    SamplingParams(repetition_penalty=2.5, logit_bias=((3, 2.0),)),
    SamplingParams(allowed_token_ids=tuple(range(0, VOCAB, 3)), bad_words=((9,),)),
    SamplingParams(constraint=one_of(*WORDS)),
]


@pytest.fixture(scope="module", autouse=True)
def words(bench: Bench) -> None:
    bench.runner._sampling = SamplingStates(VOCAB, compile_words)


def asked(sampling: SamplingParams) -> dict[str, Any]:
    return {"sampling": sampling, "context": ids_of(IDS) if sampling.reads_prompt else b""}


def complete(runner: DeepseekV41Runner, sampling: SamplingParams, num_draft: int, sequence: int = 1) -> tuple[list[int], Any]:
    """Up to LENGTH tokens and how the output ended, by the engine."""
    (done,) = run(runner, item(sequence, 0, IDS, table(0), **asked(sampling)))
    output, at = list(done.tokens), len(IDS)
    while len(output) < LENGTH and done.finish is None:
        drafts = min(num_draft, LENGTH - len(output) - 1)
        (done,) = run(runner, item(sequence, at, output_index=len(output), num_draft=drafts, sampling=sampling))
        output += done.tokens
        at += len(done.tokens)
    run(runner, retired=(sequence,))
    return output, done.finish


def naive(bench: Bench, sampling: SamplingParams) -> list[int]:
    """The greedy output by plain Python."""
    output: list[int] = []
    while len(output) < LENGTH:
        logits, _ = bench.through(IDS + output, number=2)
        law = naive_law(logits[-1].tolist(), sampling, IDS, output)
        output.append(max(range(VOCAB), key=lambda token: law[token]))
    return output


@pytest.mark.parametrize("sampling", GREEDY)
def test_greedy_output_is_the_naive_one_with_any_number_of_drafts(bench: Bench, sampling: SamplingParams) -> None:
    want = naive(bench, sampling)
    assert want != naive(bench, SamplingParams())
    for num_draft in (0, 1, BLOCK):
        assert complete(bench.runner, sampling, num_draft)[0] == want


@pytest.mark.parametrize("num_draft", [0, 1, 3, BLOCK])
def test_sampled_output_keeps_to_its_constraint_under_drafts(bench: Bench, num_draft: int) -> None:
    short = [word[:3] for word in WORDS[::5]] + [word for word in WORDS if word[0] not in {word[0] for word in WORDS[::5]}][:5]
    for seed in range(6):
        output, finish = complete(
            bench.runner, SamplingParams(temperature=2.0, seed=seed, constraint=one_of(*short)), num_draft
        )
        assert output in short and finish == "stop"


def test_a_dead_end_ends_one_request(bench: Bench) -> None:
    word = WORDS[1]
    others = tuple(token for token in range(VOCAB) if token != word[2])
    sampling = SamplingParams(constraint=one_of(word), allowed_token_ids=others)
    for num_draft in (0, BLOCK):
        assert complete(bench.runner, sampling, num_draft) == (word[:2], CONSTRAINT_DEAD_END)


def test_drafts_keep_to_what_may_follow_and_leave_no_trace_of_themselves(bench: Bench) -> None:
    sampling = SamplingParams(constraint=one_of([4, 7, 2]), frequency_penalty=1.0)
    _, state = bench.through(IDS, number=2)
    choice = SamplingState(item(1, 0, IDS, **asked(sampling)), VOCAB, compile_words)
    with torch.inference_mode():
        (drafts,) = bench.dspark.draft([Drafting(state, 1, sampling, 0, choice)])
    assert drafts.tokens == [4, 7, 2]  # and no more, as nothing may follow
    assert (len(drafts.logits), len(drafts.confidence), choice.finish) == (3, 3, None)
    assert [row.isfinite().nonzero().flatten().tolist() for row in drafts.logits] == [[4], [7], [2]]
    edited = choice.edit(torch.zeros(VOCAB))
    assert edited is not None and edited[4] == 0.0


def test_without_a_compiler_a_constraint_is_unsupported_and_synthetic_runs_ignore_it() -> None:
    sampling = SamplingParams(constraint=one_of([4, 7, 2]))
    assert complete(Bench().runner, sampling, 0) == ([], UNSUPPORTED)
    output, finish = complete(Bench(RunnerOptions(synthetic_acceptance=2.0)).runner, sampling, BLOCK)
    assert (len(output), finish) == (LENGTH, None)


@pytest.mark.parametrize("sizes", [(), (7,), (1, 50), (64,)])
def test_a_prompt_has_the_same_scores_however_it_is_cut(bench: Bench, sizes: tuple[int, ...]) -> None:
    ids, at, found = prompt("medium"), 0, []
    logits, _ = bench.through(ids, number=2)
    for piece in cut(ids, sizes):
        scored, end = ids_of(ids[at + 1 : at + 1 + len(piece)]), at + len(piece) == len(ids)
        part = item(3, at, piece, () if at else table(0), sample=end, scored=scored, scored_top=1)
        found += run(bench.runner, part)[0].prompt_logprobs
        at += len(piece)
    run(bench.runner, retired=(3,))
    assert found == [token_logprobs(row, token, 1) for row, token in zip(logits, ids[1:], strict=False)]
