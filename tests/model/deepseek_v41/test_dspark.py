from __future__ import annotations

import pytest
import torch

import rackserve.model.deepseek_v41.backbone as backbone_module
import rackserve.model.deepseek_v41.dspark as dspark_module
from rackserve.base.request import SamplingParams
from rackserve.model.acceptance import draw_draft
from rackserve.model.deepseek_v41.dspark import Drafting
from rackserve.model.deepseek_v41.state import SequenceState
from tests.model.deepseek_v41.golden import CONFIG, PROMPTS, Bench, continuation, prompt, vector
from tests.model.deepseek_v41.orders import sink_last

BLOCK = CONFIG.dspark_block_size


@pytest.fixture(scope="module")
def states(bench: Bench) -> list[SequenceState]:
    return [bench.through(prompt(name), number=number)[1] for number, name in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def requests(states: list[SequenceState]) -> list[Drafting]:
    return [Drafting(state, continuation(name)[0], SamplingParams(), 0) for state, name in zip(states, PROMPTS, strict=True)]


@pytest.mark.parametrize("number", range(3))
def test_drafts_are_those_of_another_implementation(bench: Bench, requests: list[Drafting], number: int) -> None:
    drafts = bench.draft(requests[number].state, requests[number].anchor)
    assert drafts.tokens == vector(f"{PROMPTS[number]}_drafts").tolist()
    assert drafts.logits.shape == (BLOCK, CONFIG.vocab_size) and drafts.confidence.shape == (BLOCK,)
    off = (drafts.confidence - vector(f"{PROMPTS[number]}_confidence_logits")).abs().max()
    # Those of the longest prompt come from an implementation that rounded some window rows the other way: see below.
    assert float(off) < (6e-3 if PROMPTS[number] == "long" else 1e-3)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other roundings turn on another CPU")
def test_confidence_of_the_longest_prompt_was_made_with_another_order_of_sums(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, requests: list[Drafting]
) -> None:
    want = vector("long_confidence_logits")
    ours = bench.draft(requests[2].state, requests[2].anchor).confidence
    assert 4e-3 < float((ours - want).abs().max()) < 6e-3
    for module in (backbone_module, dspark_module):
        monkeypatch.setattr(module, "attend", sink_last)
    _, state = bench.through(prompt("long"), number=4)
    assert float((bench.draft(state, requests[2].anchor).confidence - want).abs().max()) < 1e-5


def test_a_block_has_the_same_bits_alone_and_among_others(bench: Bench, requests: list[Drafting]) -> None:
    with torch.inference_mode():
        together = bench.dspark.draft(requests[::-1])
    for request, drafts in zip(reversed(requests), together, strict=True):
        alone = bench.draft(request.state, request.anchor)
        assert alone.tokens == drafts.tokens
        assert torch.equal(alone.logits, drafts.logits) and torch.equal(alone.confidence, drafts.confidence)


def test_each_draft_is_drawn_from_logits_that_the_one_before_it_corrected(bench: Bench, requests: list[Drafting]) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=3)
    with torch.inference_mode():
        (drafts,) = bench.dspark.draft([Drafting(requests[1].state, requests[1].anchor, sampling, 7)])
        embedding, last = bench.backbone.embedding, CONFIG.num_nextn_predict_layers - 1
        before = embedding.rows(f"mtp.{last}.markov_head.embed", torch.tensor([requests[1].anchor, *drafts.tokens[:-1]]))
        corrections = before @ bench.dspark._markov.right()
        greedy = bench.draft(requests[1].state, requests[1].anchor)
        places = embedding.rows(f"mtp.{last}.markov_head.embed", torch.tensor([requests[1].anchor, *greedy.tokens[:-1]]))
    assert drafts.tokens == [draw_draft(drafts.logits[place], sampling, 7 + place) for place in range(BLOCK)]
    base = greedy.logits - places @ bench.dspark._markov.right()
    assert torch.allclose(drafts.logits - corrections, base, atol=1e-4)  # the block itself does not depend on what was drawn


def test_rows_before_the_start_of_a_sequence_do_not_matter(bench: Bench, requests: list[Drafting]) -> None:
    want = bench.draft(requests[0].state, requests[0].anchor)
    state = bench.begin(4)
    state.windows.fill_(0xFF)
    bench.compute((state, prompt("short")))
    assert state.length < CONFIG.sliding_window
    got = bench.draft(state, requests[0].anchor)
    assert torch.equal(got.logits, want.logits) and torch.equal(got.confidence, want.confidence)


def test_a_block_sees_the_whole_window_and_nothing_older(bench: Bench, requests: list[Drafting]) -> None:
    want = bench.draft(requests[1].state, requests[1].anchor).logits
    _, state = bench.through(prompt("medium"), number=4)
    stages = state.valid[CONFIG.num_hidden_layers :]
    stages.fill_(state.length - CONFIG.sliding_window)
    assert torch.equal(bench.draft(state, requests[1].anchor).logits, want)
    stages.fill_(state.length - CONFIG.sliding_window + 1)
    assert not torch.equal(bench.draft(state, requests[1].anchor).logits[0], want[0])


def test_without_sequences_nothing_is_drafted(bench: Bench) -> None:
    with torch.inference_mode():
        assert bench.dspark.draft([]) == []
    bench.dspark.learn([], [])
