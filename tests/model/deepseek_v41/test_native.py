"""The native path: the golden vectors as near as orders of sums allow, and its own bits in every cut and company."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch
from torch import Tensor

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.kernels.cpu import library, v41
from rackserve.model.deepseek_v41.native import MAX_ROWS, NativeBackbone
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.runner import DeepseekV41Runner
from rackserve.model.deepseek_v41.state import SequenceState
from rackserve.model.parallel import Alone, Share
from tests.model.deepseek_v41.golden import (
    BLOCK_TOKENS,
    CONFIG,
    FILES,
    NUM_BLOCKS,
    PROMPTS,
    Bench,
    Job,
    complete,
    continuation,
    cut,
    ids_of,
    item,
    poisoned,
    prompt,
    run,
    same_state,
    table,
    vector,
)

FOUND = library.find()
pytestmark = pytest.mark.skipif(FOUND is None or not v41.serves(FOUND), reason="no native kernels were built here")

CLOSE = 2e-4
"""What other orders of sums make of a logit, unless a rounding falls on the other side: that moves it further."""


@pytest.fixture(scope="module")
def native() -> Bench:
    return Bench(kernels="native")


@pytest.fixture(scope="module")
def one_shot(native: Bench) -> dict[str, tuple[Tensor, SequenceState, list[Tensor]]]:
    """Logits, state and global rows of every prompt computed at once and alone."""
    native.poison()
    found = {}
    for number, name in enumerate(PROMPTS):
        logits, state = native.through(prompt(name), number=number)
        found[name] = (logits, state, native.global_rows(state))
    return found


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_are_those_of_another_implementation(
    one_shot: dict[str, tuple[Tensor, SequenceState, list[Tensor]]], name: str
) -> None:
    logits, wanted = one_shot[name][0], vector(f"{name}_logits")
    off = (logits - wanted).abs().amax(1) * vector(f"{name}_agree")
    assert float((off < CLOSE).float().mean()) > 0.75
    assert float(off.median()) < 2e-5
    assert float(off.max()) < 0.05
    assert torch.equal(logits.argmax(1), wanted.argmax(1))


@pytest.mark.parametrize("name", PROMPTS)
def test_text_goes_on_as_in_another_implementation(native: Bench, name: str) -> None:
    (output,) = complete(native.runner, Job(prompt(name), 24))
    assert output == continuation(name)


@pytest.mark.parametrize("name", PROMPTS)
def test_drafts_are_those_of_another_implementation(
    native: Bench, one_shot: dict[str, tuple[Tensor, SequenceState, list[Tensor]]], name: str
) -> None:
    state = native.through(prompt(name), number=5)[1]
    drafts = native.draft(state, continuation(name)[0])
    assert drafts.tokens == vector(f"{name}_drafts").tolist()
    assert float((drafts.confidence - vector(f"{name}_confidence_logits")).abs().max()) < 1e-2


STEPS = (1,) * 40


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("short", (1,)), ("medium", (1,)), ("long", (160, *STEPS)), ("medium", (7,)), ("long", (2, 1, 33, 3, 16))],
)
def test_chunks_change_no_bit(
    native: Bench, one_shot: dict[str, tuple[Tensor, SequenceState, list[Tensor]]], name: str, sizes: tuple[int, ...]
) -> None:
    logits, state = native.through(prompt(name), sizes, number=4)
    assert torch.equal(logits, one_shot[name][0])
    assert same_state(state, one_shot[name][1])
    assert all(map(torch.equal, native.global_rows(state), one_shot[name][2]))


@pytest.mark.parametrize("sizes", [((1,), (2,), (9, 1)), ((12,), (60,), (200,)), ((5, 1), (33,), (64, 3))])
def test_company_changes_no_bit(
    native: Bench, one_shot: dict[str, tuple[Tensor, SequenceState, list[Tensor]]], sizes: tuple[tuple[int, ...], ...]
) -> None:
    states = [native.begin(number + 6) for number in range(3)]
    logits: list[list[Tensor]] = [[], [], []]
    for pieces in zip_longest(*(cut(prompt(name), size) for name, size in zip(PROMPTS, sizes, strict=True))):
        present = [number for number, piece in enumerate(pieces) if piece]
        done = native.compute(*((states[number], pieces[number]) for number in reversed(present)))
        for number, rows in zip(reversed(present), done, strict=True):
            logits[number].append(rows)
    for name, state, parts in zip(PROMPTS, states, logits, strict=True):
        assert torch.equal(torch.cat(parts), one_shot[name][0])
        assert same_state(state, one_shot[name][1])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(
    native: Bench, one_shot: dict[str, tuple[Tensor, SequenceState, list[Tensor]]], threads: int
) -> None:
    bench = Bench(kernels="native", threads=threads)
    for name, sizes in (("short", (1,)), ("medium", (11, 1)), ("long", (160, *STEPS))):
        logits, state = bench.through(prompt(name), sizes)
        assert torch.equal(logits, one_shot[name][0])
        assert same_state(state, one_shot[name][1])
        drafts, wanted = (of.draft(one_shot[name][1], 5) for of in (bench, native))
        assert drafts.tokens == wanted.tokens
        assert torch.equal(drafts.logits, wanted.logits) and torch.equal(drafts.confidence, wanted.confidence)


def test_threads_that_share_steps_with_drafts_write_the_same_text(native: Bench) -> None:
    alone, shared = (
        [Job(prompt(name), 10, num_draft=draft) for name, draft in zip(PROMPTS, (5, 2, 0), strict=True)] for _ in range(2)
    )
    assert complete(Bench(kernels="native", threads=2).runner, *shared) == complete(native.runner, *alone)
    assert [job.verified for job in shared] == [job.verified for job in alone]


def test_rounded_inputs_round_as_the_torch_path_does(native: Bench) -> None:
    rounding = Bench(RunnerOptions(activation_rounding=True), kernels="native")
    logits, state = rounding.through(prompt("medium"))
    wanted, _ = Bench(RunnerOptions(activation_rounding=True)).through(prompt("medium"))
    alike = torch.nn.functional.cosine_similarity(logits, wanted)
    assert float((alike > 0.999).float().mean()) > 0.5  # roundings that fall otherwise spread, and more are taken here
    for sizes in ((50, *STEPS), (7, 2)):
        again, same = rounding.through(prompt("medium"), sizes, number=1)
        assert torch.equal(again, logits) and same_state(same, state)


def test_early_rows_end_at_the_last_compressor(native: Bench) -> None:
    """With the decoder's layers left out for a prompt's beginning, the torch path's rows come out, in any chunks."""
    ids = prompt("long")
    torch_path = Bench()
    found = []
    for bench, sizes in ((native, (200,)), (native, (90, 7, 103)), (torch_path, (200,))):
        state, logits = bench.begin(9), []
        for part in cut(ids, sizes):
            state.valid[CONFIG.first_decoder_layer :].clamp_(min=150)
            logits += bench.compute((state, part), full_from=150)
        found.append((torch.cat(logits), state))
    assert len(found[0][0]) == 50
    assert torch.equal(found[0][0], found[1][0]) and same_state(found[0][1], found[1][1])
    off = (found[0][0] - found[2][0]).abs().amax(1)
    assert float(off[0]) < CLOSE and float(off.max()) < 0.5


def test_drafts_of_several_sequences_are_those_of_each_alone(native: Bench) -> None:
    jobs = [Job(prompt(name), 10, num_draft=draft) for name, draft in zip(PROMPTS, (5, 2, 0), strict=True)]
    together = complete(native.runner, *jobs)
    assert together == [continuation(name)[:10] for name in PROMPTS]
    assert jobs[0].verified > 0


def test_a_block_read_before_it_was_written_is_an_error_and_not_an_answer() -> None:
    bench = Bench(kernels="native")
    with pytest.raises(InvariantError, match="not finite"):
        run(bench.runner, item(1, 16, prompt("medium")[16:40], table(), replayed=16, history=ids_of(prompt("medium")[13:16])))


def test_a_pass_longer_than_the_buffers_makes_larger_ones(
    one_shot: dict[str, tuple[Tensor, SequenceState, list[Tensor]]],
) -> None:
    bench = Bench(kernels="native")
    assert isinstance(bench.backbone, NativeBackbone)
    assert bench.backbone.step.max_rows == MAX_ROWS < len(prompt("long"))
    assert torch.equal(bench.through(prompt("long"))[0], one_shot["long"][0])
    assert bench.backbone.step.max_rows >= len(prompt("long"))


class Two(Alone):
    share = Share(ep_size=2)


def test_what_kernels_do_not_cover_is_left_to_torch_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Bench(kernels="auto").runner.path == Bench(kernels="native").runner.path != "torch"
    assert Bench(collectives=Two(), kernels="auto").runner.path == "torch"
    with pytest.raises(ConfigError, match=r"set runner\.kernels to torch"):
        Bench(collectives=Two(), kernels="native")
    monkeypatch.setattr(library, "find", lambda: None)
    assert Bench(kernels="auto").runner.path == "torch"
    with pytest.raises(ConfigError, match=r"kernels\.cpu\.build"):
        DeepseekV41Runner(FILES, memoryview(poisoned()), NUM_BLOCKS, BLOCK_TOKENS, kernels="native")
