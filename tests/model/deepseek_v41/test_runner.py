"""Steps in, tokens out: the golden continuations in every cut and company, and what is refused."""

from __future__ import annotations

import pytest
import torch

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.step import Step, StepItem
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.runner import DeepseekV41Runner
from rackserve.model.files import open_model
from tests.model.deepseek_v41.golden import (
    BLOCK_TOKENS,
    BLOCKS_EACH,
    CONFIG,
    FILES,
    NUM_BLOCKS,
    NUM_SLOTS,
    PROMPTS,
    Bench,
    Job,
    complete,
    continuation,
    ids_of,
    item,
    poisoned,
    prompt,
    run,
    table,
)

SIZES = ((), (7,), (1, 50), (33, 2), (16,), (12, 64))


def test_continuations_are_golden_with_any_drafts_chunks_and_company(bench: Bench) -> None:
    """All in the same steps: three prompts, 0 to 5 drafts, ways to cut the prompt."""
    kinds = {"short": (1, 4), "medium": range(6), "long": (0, 2, 5)}
    jobs = [Job(prompt(name), 24, SIZES[drafts], drafts) for name, counts in kinds.items() for drafts in counts]
    for job, output in zip(jobs, complete(bench.runner, *jobs), strict=True):
        assert output == continuation(next(name for name in PROMPTS if prompt(name) == job.ids))
        assert (job.verified > 0) == (job.num_draft > 0)


@pytest.mark.parametrize("num_draft", [0, 5])
def test_continuations_are_golden_alone(bench: Bench, num_draft: int) -> None:
    assert complete(bench.runner, Job(prompt("short"), 24, (), num_draft)) == [continuation("short")]


def test_continuations_are_golden_when_only_likely_drafts_are_verified() -> None:
    runner = Bench(RunnerOptions(draft_policy="adaptive")).runner
    jobs = [Job(prompt(name), 24, (64,), 5) for name in ("short", "medium")]
    assert complete(runner, *jobs) == [continuation("short"), continuation("medium")]


def test_log_probabilities_are_those_of_the_logits(bench: Bench) -> None:
    (result,) = run(bench.runner, item(1, 0, prompt("short"), table(), logprobs=CONFIG.vocab_size), retired=(1,))
    logits, _ = bench.through(prompt("short"), number=1)
    want = logits[-1].double().log_softmax(0)
    (shares,) = result.logprobs
    assert shares.logprob == pytest.approx(float(want[result.tokens[0]]), abs=1e-5)
    assert dict(shares.top) == pytest.approx(dict(enumerate(want.tolist())), abs=1e-5)
    run(bench.runner, retired=(1,))


def test_a_step_without_items_is_computed_and_gives_nothing(bench: Bench) -> None:
    before = bytes(bench.memory)
    assert bench.runner.run(Step(3, ())).items == ()
    assert bytes(bench.memory) == before


def test_a_retired_sequence_is_forgotten_before_its_number_is_used_again(bench: Bench) -> None:
    run(bench.runner, item(1, 0, prompt("medium"), table()), retired=(1,))
    (result,) = run(bench.runner, item(1, 0, prompt("short"), table(1)), retired=(1,))
    assert result.tokens == (continuation("short")[0],)
    run(bench.runner, retired=(1, 99))


REFUSED: list[tuple[str, StepItem]] = [
    ("outside the vocabulary", item(2, 0, [5, CONFIG.vocab_size], table(2))),
    ("outside the vocabulary", item(2, 0, [-1], table(2))),
    ("no token was sampled to continue from", item(2, 0, (), table(2))),
    ("2 tokens given for 3 positions", StepItem(2, 0, 3, ids_of([1, 2]), table(2), True)),
    ("block ids", item(2, 0, [5], (NUM_BLOCKS,))),
    ("block ids", item(2, 0, [5], (-1,))),
    ("do not fit", item(2, 0, [5], ())),
    ("do not fit", item(2, 0, [5] * (BLOCK_TOKENS + 1), (0,))),
    ("do not fit", item(2, -1, [5], (0,))),
    ("window slot", item(2, 8, [5], table(2), restore=NUM_SLOTS)),
    ("window slot", item(2, 0, [5], table(2), snapshot=NUM_SLOTS)),
    ("no state to resume from", item(2, 8, [5], table(2))),
    ("stands at position 12, its item begins at 11", item(1, 11, [5])),
    ("stands at position 12, its item begins at 13", item(1, 13, [5])),
    ("do not fit", item(1, 12, [5] * (BLOCKS_EACH * BLOCK_TOKENS - 11))),
]


def test_what_cannot_be_is_refused_and_changes_nothing(bench: Bench) -> None:
    bench.poison()
    run(bench.runner, item(1, 0, prompt("short"), table()), retired=(1, 2, 3))
    before = bytes(bench.memory)
    for reason, wrong in REFUSED:
        with pytest.raises(InvariantError, match=reason):
            run(bench.runner, item(3, 0, [7, 8], table(4)), wrong)  # nor is what stands beside it
        assert bytes(bench.memory) == before
        assert set(bench.runner._sequences) == {1}
        assert bench.runner._sequences[1].blocks == list(table())
    (result,) = run(bench.runner, item(1, 12, output_index=1))
    assert result.tokens == (continuation("short")[1],)


def test_drafts_must_fit_the_blocks_too(bench: Bench) -> None:
    ids = prompt("long")[:BLOCK_TOKENS]
    run(bench.runner, item(1, 0, ids[:-3], (0,)), retired=(1,))
    with pytest.raises(InvariantError, match=r"positions \[29, 35\) do not fit"):
        run(bench.runner, item(1, 29, output_index=1, num_draft=5))
    (result,) = run(bench.runner, item(1, 29, output_index=1, num_draft=2))
    assert result.num_verified == 2
    run(bench.runner, retired=(1,))


def test_a_block_read_before_it_was_written_is_an_error_and_not_an_answer(bench: Bench) -> None:
    bench.poison()
    with pytest.raises(InvariantError, match="not finite"):
        run(bench.runner, item(1, 16, prompt("medium")[16:40], table(), replayed=16, history=ids_of(prompt("medium")[13:16])))
    run(bench.runner, retired=(1,))


def test_arenas_and_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvariantError, match="blocks need"):
        DeepseekV41Runner(FILES, memoryview(poisoned(1, 0)), 2, BLOCK_TOKENS)
    with pytest.raises(ConfigError, match="make it even"):
        DeepseekV41Runner(FILES, memoryview(poisoned(1, 0)), 1, 31)
    with pytest.raises(ConfigError, match="llama"):
        DeepseekV41Runner(open_model("embedded"), memoryview(poisoned(1, 0)), 1, BLOCK_TOKENS)


def test_torch_computes_on_one_thread() -> None:
    torch.set_num_threads(2)
    Bench()
    assert torch.get_num_threads() == 1
