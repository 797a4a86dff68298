"""The forward pass against logits of other implementations, and against itself in every cut and company."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import rackserve.model.deepseek_v41.backbone as backbone_module
from rackserve.model.deepseek_v41.backbone import Backbone
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.state import Proposal, SequenceState
from tests.model.deepseek_v41.golden import CONFIG, PROMPTS, Bench, cut, prompt, same_state, vector
from tests.model.deepseek_v41.orders import attend_span_densely, sink_last

to_the_bit = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the golden logits were made with other sums than this CPU's"
)
each_prompt = pytest.mark.parametrize("name", PROMPTS)


class Done(NamedTuple):
    """A prompt computed at once and alone."""

    logits: Tensor
    state: SequenceState
    rows: list[Tensor]


@pytest.fixture(scope="module")
def one_shot(bench: Bench) -> dict[str, Done]:
    found = {}
    for name in PROMPTS:
        bench.poison()
        logits, state = bench.through(prompt(name))
        found[name] = Done(logits, state, bench.global_rows(state))
    return found


def off_by(logits: Tensor, name: str) -> Tensor:
    """The largest difference to the golden logits at each position on which two implementations agree; 0 at others."""
    return (logits - vector(f"{name}_logits")).abs().amax(1) * vector(f"{name}_agree")


@each_prompt
def test_logits_are_those_of_another_implementation(one_shot: dict[str, Done], name: str) -> None:
    assert float(off_by(one_shot[name].logits, name).max()) < 2e-4


@to_the_bit
@pytest.mark.parametrize(("name", "share"), [("medium", 0.95), ("long", 0.9)])
def test_only_the_order_in_which_a_softmax_row_is_summed_differs_from_the_reference(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, one_shot: dict[str, Done], name: str, share: float
) -> None:
    """In its order nearly all logits are its very bits, the others off in the last place; at every position."""
    monkeypatch.setattr(Backbone, "_attend_span", attend_span_densely)
    off = (bench.through(prompt(name))[0] - vector(f"{name}_logits")).abs().amax(1)
    assert float((off == 0).float().mean()) > share
    assert float(off.max()) < 1e-5
    assert float((off_by(one_shot[name].logits, name) == 0).float().mean()) < 0.7  # not so in our order


@to_the_bit
def test_an_order_turns_few_roundings_and_they_are_seen_as_small_steps(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, one_shot: dict[str, Done]
) -> None:
    """With the sink summed last one window row of layer 3 rounds the other way; all that differs comes from there."""
    kept: list[Proposal] = []
    commit = SequenceState.commit

    def spy(self: SequenceState, proposal: Proposal, upto: int) -> None:
        kept.append(proposal)
        commit(self, proposal, upto)

    monkeypatch.setattr(SequenceState, "commit", spy)
    bench.through(prompt("long"))
    monkeypatch.setattr(backbone_module, "attend", sink_last)
    logits, state = bench.through(prompt("long"))
    ours, other = (proposal.windows for proposal in kept)
    assert (ours != other).nonzero()[0].tolist() == [3, 85, 41]  # layer, position, channel
    step = (ours[3, 85, 41].int() - other[3, 85, 41].int()).abs()
    assert int(step) == 1  # to the neighbouring code
    for ours_, other_, first in zip(one_shot["long"].rows, bench.global_rows(state), (None, None, 92, None), strict=True):
        changed = (ours_ != other_).any(1).nonzero().flatten().tolist()
        assert changed[:1] == ([] if first is None else [first])
    off = off_by(logits, "long")
    assert np.flatnonzero(off > 2e-4).tolist() == [96, 97, 98, 99, 102, 103, 137, 144, 151, 197]
    assert float(off.max()) < 1e-3


STEPS = (1,) * 40


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("short", (1,)), ("medium", (1,)), ("long", (160, *STEPS)),
        ("short", (7,)), ("medium", (7,)), ("long", (2, 1, 33, 3, 16)),
    ],
)  # fmt: skip
def test_chunks_change_no_bit(bench: Bench, one_shot: dict[str, Done], name: str, sizes: tuple[int, ...]) -> None:
    bench.poison()
    logits, state = bench.through(prompt(name), sizes)
    assert torch.equal(logits, one_shot[name].logits)
    assert same_state(state, one_shot[name].state)
    assert all(map(torch.equal, bench.global_rows(state), one_shot[name].rows))


@pytest.mark.parametrize("sizes", [((1,), (2,), (9, 1)), ((12,), (60,), (200,)), ((5, 1), (33,), (64, 3))])
def test_company_changes_no_bit(bench: Bench, one_shot: dict[str, Done], sizes: tuple[tuple[int, ...], ...]) -> None:
    """All prompts in the same passes, each in chunks of its own; a sequence that is done leaves the others alone."""
    bench.poison()
    states = [bench.begin(number) for number in range(3)]
    logits: list[list[Tensor]] = [[], [], []]
    for pieces in zip_longest(*(cut(prompt(name), size) for name, size in zip(PROMPTS, sizes, strict=True))):
        present = [number for number, piece in enumerate(pieces) if piece]
        done = bench.compute(*((states[number], pieces[number]) for number in reversed(present)))
        for number, rows in zip(reversed(present), done, strict=True):
            logits[number].append(rows)
    for name, state, rows in zip(PROMPTS, states, logits, strict=True):
        assert torch.equal(torch.cat(rows), one_shot[name].logits)
        assert same_state(state, one_shot[name].state)
        assert all(map(torch.equal, bench.global_rows(state), one_shot[name].rows))


def test_weights_as_stored_change_no_bit(one_shot: dict[str, Done]) -> None:
    logits, _ = Bench(RunnerOptions(weights="stored")).through(prompt("medium"))
    assert torch.equal(logits, one_shot["medium"].logits)


def test_rounded_inputs_change_the_logits_and_not_their_independence_of_chunks(one_shot: dict[str, Done]) -> None:
    rounding = Bench(RunnerOptions(activation_rounding=True))
    logits, state = rounding.through(prompt("medium"))
    assert not torch.allclose(logits, one_shot["medium"].logits, atol=0.1)
    assert float(torch.corrcoef(torch.stack((logits.flatten(), one_shot["medium"].logits.flatten())))[0, 1]) > 0.8
    for sizes in ((50, *STEPS), (7, 2)):
        again, same = rounding.through(prompt("medium"), sizes, number=1)
        assert torch.equal(again, logits) and same_state(same, state)


def test_what_lies_in_the_blocks_beyond_a_sequence_does_not_matter(bench: Bench, one_shot: dict[str, Done]) -> None:
    """Unwritten bytes are NaN or infinite, as scales and as values; next, those of another sequence."""
    bench.poison()
    assert bool(one_shot["medium"].logits.isfinite().all())
    bench.through(prompt("long")[::-1])
    assert torch.equal(bench.through(prompt("medium"))[0], one_shot["medium"].logits)


def test_a_pass_without_rows_leaves_nothing(bench: Bench) -> None:
    before = bytes(bench.memory)
    assert bench.compute() == []
    with torch.inference_mode():
        done = bench.backbone.forward([], [], bench.reads([], []))
        assert done.hidden.shape == (0, CONFIG.hidden_size) and done.proposals == []
        assert bench.backbone.logits(done.hidden).shape == (0, CONFIG.vocab_size)
    assert bytes(bench.memory) == before


def test_the_vocabulary_of_one_device_has_every_row(bench: Bench) -> None:
    ids = torch.tensor([0, 511, 7])
    with torch.inference_mode():
        rows = bench.backbone.embedding.rows("embed", ids)
        assert rows.shape == (3, CONFIG.hidden_size)
        assert torch.equal(rows[2:], bench.backbone.embedding.rows("embed", ids[2:]))
