from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from msgspec import structs
from torch import Tensor

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.request import SamplingParams
from rackserve.base.step import CONSTRAINT_DEAD_END, StepItem
from rackserve.model import acceptance
from rackserve.model.acceptance import SyntheticAcceptance, draw_draft, remainder, verify
from rackserve.model.sampler import probabilities, sample
from rackserve.model.sampling_state import SamplingState
from tests.model.naive_sampling import compile_words, naive_law, one_of, words_of

VOCAB = 4
TARGET = torch.tensor([[0.5, -1.0, 1.2, 0.0], [2.0, 0.1, -0.3, 1.1], [-0.7, 0.9, 0.8, 0.2], [0.0, 0.3, -1.5, 1.0]])
"""Row t: the target's logits after token t."""

NONE = -1e4
HEADS = {
    "equal": TARGET,
    "sharper": TARGET * 3,
    "other": TARGET[:, [2, 0, 3, 1]],
    "disjoint": torch.where(TARGET.amax(1, keepdim=True) == TARGET, NONE, 2.0),
}
LONE = torch.where(TARGET.amax(1, keepdim=True) == TARGET, TARGET, NONE)
"""A target of one token in each row, so that a disjoint head shares nothing with it."""


def reference(logits: Sequence[float], sampling: SamplingParams) -> list[float]:
    """The law of one token, in plain Python."""
    weights = [math.exp((value - max(logits)) / sampling.temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[: sampling.top_k or len(weights)]
    kept: list[int] = []
    while sum(weights[token] for token in kept) < sampling.top_p * sum(weights[token] for token in order) * (1 - 1e-12):
        kept.append(order[len(kept)])
    return [weights[t] / sum(weights[k] for k in kept) if t in kept else 0.0 for t in range(len(weights))]


def generate(target: Tensor, head: Tensor | None, num_draft: int, length: int, sampling: SamplingParams) -> list[int]:
    """`length` tokens after token 0 in steps of draft and verify. Without a head, drafts are a fixed guess at each output."""
    tokens = [0]
    while len(tokens) <= length:
        index, drafts, rows = len(tokens) - 1, list[int](), list[Tensor]()
        for at in range(num_draft):
            if head is not None:
                rows.append(head[([tokens[-1], *drafts])[-1]])
            drafts.append((index + at) % VOCAB if head is None else draw_draft(rows[-1], sampling, index + at))
        stands = target[torch.tensor([tokens[-1], *drafts])]
        drawn = None if head is None else torch.stack(rows) if rows else torch.empty(0, VOCAB)
        step = verify(stands, drafts, drawn, sampling, index)
        assert 1 <= len(step) <= num_draft + 1 and step[:-1] == drafts[: len(step) - 1]
        tokens += step
    return tokens[1 : length + 1]


def chi_square_bound(freedom: int) -> float:
    """What chi-square exceeds once in 30,000 times (Wilson and Hilferty's approximation at four sigma)."""
    spread = 2 / (9 * max(freedom, 1))
    return freedom * (1 - spread + 4 * math.sqrt(spread)) ** 3 + 1e-9


CASES = [
    ("equal", 2, SamplingParams(temperature=1.0)),
    ("sharper", 1, SamplingParams(temperature=1.0)),
    ("sharper", 3, SamplingParams(temperature=2.0)),
    ("other", 1, SamplingParams(temperature=0.5)),
    ("other", 2, SamplingParams(temperature=1.0, top_p=0.8)),
    ("other", 3, SamplingParams(temperature=1.0)),
    ("disjoint", 1, SamplingParams(temperature=1.0)),
    ("disjoint", 3, SamplingParams(temperature=0.5)),
    ("sharper", 2, SamplingParams(temperature=2.0, top_k=2)),
    ("", 2, SamplingParams(temperature=1.0)),
    ("", 3, SamplingParams(temperature=2.0, top_k=3, top_p=0.8)),
]


@pytest.mark.parametrize(("head", "num_draft", "sampling"), CASES)
def test_every_prefix_follows_the_law_of_the_target_within_five_sigma_and_by_chi_square(
    head: str, num_draft: int, sampling: SamplingParams
) -> None:
    number, length = 1500, 3
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(number):
        drawn = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, seed)
        tokens = generate(TARGET, HEADS.get(head), num_draft, length, drawn)
        counts.update(tuple(tokens[:end]) for end in range(1, length + 1))
    rows = [reference(row, sampling) for row in TARGET.tolist()]
    for end in range(1, length + 1):
        likely, rare = [], [0.0, 0.0]  # (count, expected); what is rare is one cell
        for prefix in product(range(VOCAB), repeat=end):
            share = math.prod(rows[before][token] for before, token in zip((0, *prefix), prefix, strict=False))
            assert abs(counts[prefix] - number * share) <= 5 * math.sqrt(number * share * (1 - share)) + 1e-9, prefix
            if number * share >= 5:
                likely.append((counts[prefix], number * share))
            else:
                rare = [rare[0] + counts[prefix], rare[1] + number * share]
        cells = [*likely, rare] if rare[1] >= 5 else likely
        assert sum((count - expected) ** 2 / expected for count, expected in cells) <= chi_square_bound(len(cells) - 1)


@pytest.mark.parametrize("draft", range(VOCAB))
@pytest.mark.parametrize("head", ["sharper", "other", ""])
def test_a_draft_stands_by_the_ratio_and_another_comes_from_what_the_target_has_above(
    monkeypatch: pytest.MonkeyPatch, head: str, draft: int
) -> None:
    number, units = 100, {"accept": 0.0, "instead": 0.0}
    monkeypatch.setattr(acceptance, "draw_unit", lambda purpose, seed, index: units[purpose])
    sampling, drawn = SamplingParams(temperature=1.0), HEADS[head][:1] if head else None
    p = reference(TARGET[0].tolist(), sampling)
    q = reference(HEADS[head][0].tolist(), sampling) if head else [float(token == draft) for token in range(VOCAB)]
    stood, instead = 0, Counter[int]()
    for step in range(number):  # an even grid in place of chance
        units.update(accept=(step + 0.5) / number, instead=0.5)
        stood += verify(TARGET[:2], [draft], drawn, sampling, 0)[0] == draft
        if p[draft] < q[draft]:
            units.update(accept=1 - 1e-9, instead=(step + 0.5) / number)
            instead.update(verify(TARGET[:2], [draft], drawn, sampling, 0))
    assert abs(stood / number - min(1.0, p[draft] / q[draft])) <= 1 / number
    above = [max(0.0, mine - guess) for mine, guess in zip(p, q, strict=True)]
    for token, count in instead.items():
        assert abs(count / number - above[token] / sum(above)) <= 2 / number


def test_the_token_after_drafts_that_all_stand_is_the_plain_draw_of_its_output() -> None:
    for seed in range(20):
        sampling = SamplingParams(temperature=2.0, seed=seed)
        drafts = [draw_draft(TARGET[0], sampling, 4 + at) for at in range(3)]
        assert verify(TARGET[[0, 0, 0, 1]], drafts, TARGET[[0, 0, 0]], sampling, 4) == [*drafts, sample(TARGET[1], sampling, 7)]


def test_nothing_in_common_takes_no_draft_and_all_in_common_takes_every_one() -> None:
    for seed in range(20):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        drafts = [draw_draft(HEADS["disjoint"][0], sampling, at) for at in range(3)]
        assert verify(LONE[[0, 0, 0, 0]], drafts, HEADS["disjoint"][[0, 0, 0]], sampling, 0) == [2]
        same = [draw_draft(TARGET[0], sampling, at) for at in range(3)]
        assert verify(TARGET[[0, 0, 0, 1]], same, TARGET[[0, 0, 0]], sampling, 0)[:3] == same


@pytest.mark.parametrize("num_draft", range(5))
def test_greedy_output_equals_that_without_drafts_token_for_token(num_draft: int) -> None:
    torch.manual_seed(1)
    target, sampling = torch.randn(VOCAB, VOCAB), SamplingParams()
    target[1, :2] = target[1].amax() + 1  # equals: the lower id is taken
    plain = [0]
    for index in range(12):
        plain.append(sample(target[plain[-1]], sampling, index))
    for head in (target, target + torch.randn(VOCAB, VOCAB), -target):
        assert generate(target, head, num_draft, 12, sampling) == plain[1:]


def test_greedy_keeps_drafts_up_to_the_first_that_differs() -> None:
    rows = torch.eye(4)[[3, 1, 2, 0]]
    assert verify(rows, [3, 1, 2], None, SamplingParams(), 0) == [3, 1, 2, 0]
    assert verify(rows, [3, 0, 2], None, SamplingParams(), 0) == [3, 1]
    assert verify(rows, [2, 1, 2], None, SamplingParams(), 0) == [3]


def test_without_drafts_a_step_is_a_plain_draw() -> None:
    for temperature, index in product((0.0, 1e-7, 1.0, 2.0), range(10)):
        sampling = SamplingParams(temperature, seed=index)
        assert verify(TARGET[:1], [], None, sampling, index) == [sample(TARGET[0], sampling, index)]


def test_seeds_change_results_at_temperature_one_and_not_at_zero() -> None:
    def outputs(temperature: float) -> set[tuple[int, ...]]:
        return {tuple(generate(TARGET, HEADS["other"], 3, 6, SamplingParams(temperature, seed=seed))) for seed in range(10)}

    assert len(outputs(0.0)) == 1
    assert len(outputs(1.0)) > 5
    assert outputs(1.0) == outputs(1.0)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-7, 1.0, 2.0])
@pytest.mark.parametrize("num_draft", range(5))
def test_zeros_ties_and_tiny_temperatures_give_tokens_that_the_target_allows(temperature: float, num_draft: int) -> None:
    target = torch.tensor([3.0, NONE, 3.0, -math.inf])
    for head, seed in product((target, target.flip(0), torch.tensor([NONE, 9.0, NONE, NONE])), range(10)):
        sampling = SamplingParams(temperature, top_p=0.9, seed=seed)
        drafts = [draw_draft(head, sampling, at) for at in range(num_draft)]
        tokens = verify(target.expand(num_draft + 1, -1), drafts, head.expand(num_draft, -1), sampling, 0)
        assert 1 <= len(tokens) <= num_draft + 1
        assert set(tokens) <= {0, 2}


def test_a_draft_its_own_head_rules_out_stands_only_if_the_target_allows_it() -> None:
    head, sampling = torch.tensor([9.0, NONE, NONE, NONE]), SamplingParams(temperature=1.0, seed=5)
    assert verify(TARGET[:2], [1], head[None], sampling, 0)[0] == 1
    assert verify(LONE[:2], [1], head[None], sampling, 0) == [2]


def test_what_rounding_leaves_empty_is_drawn_from_the_target() -> None:
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert remainder(p, p + 1e-16).tolist() == p.tolist()
    assert remainder(p, torch.tensor([0.5, 0.5], dtype=torch.float64)).tolist() == [0.0, 0.25]


def test_rows_that_do_not_fit_the_drafts_are_refused() -> None:
    sampling = SamplingParams(temperature=1.0)
    wrong: list[Callable[[], object]] = [
        lambda: verify(TARGET[:2], [1, 2], TARGET[:2], sampling, 0),
        lambda: verify(TARGET[:3], [1, 2], TARGET[:3], sampling, 0),
    ]
    for call in wrong:
        with pytest.raises(InvariantError, match="2 drafts need"):
            call()


def test_the_probability_of_a_draft_is_under_the_filters_of_the_request() -> None:
    # Token 3 of the head falls to top_k, so it never comes up, and the target's own top two are all there is.
    sampling = SamplingParams(temperature=1.0, top_k=2)
    assert probabilities(TARGET[0], sampling).nonzero().flatten().tolist() == [0, 2]
    assert {draw_draft(HEADS["other"][0], sampling, index) for index in range(60)} == {0, 1}


@pytest.mark.parametrize("mean", [1.0, 1.25, 3.0, 3.51, 6.0])
def test_synthetic_acceptance_has_its_mean_and_only_the_whole_numbers_beside_it(mean: float) -> None:
    synthetic, number = SyntheticAcceptance(mean, 7), 4000
    drawn = [synthetic.num_tokens(f"r{index % 5}", index, 5) for index in range(number)]
    assert set(drawn) == {math.floor(mean), math.ceil(mean)}
    assert abs(sum(drawn) / number - mean) <= 5 * 0.5 / math.sqrt(number)
    assert drawn == [synthetic.num_tokens(f"r{index % 5}", index, 5) for index in range(number)]


def test_synthetic_acceptance_differs_by_sequence_and_seed_and_is_capped_by_the_drafts_there_are() -> None:
    def drawn(seed: int, sequence: int) -> list[int]:
        return [SyntheticAcceptance(2.5, seed).num_tokens(sequence, index, 5) for index in range(50)]

    assert drawn(0, 0) != drawn(1, 0) and drawn(0, 0) != drawn(0, 1)
    assert [SyntheticAcceptance(3.0).num_tokens(0, 0, drafts) for drafts in range(4)] == [1, 2, 3, 3]


def test_synthetic_acceptance_says_what_it_is() -> None:
    assert SyntheticAcceptance(3.51).label == "synthetic acceptance 3.51: output tokens are not the model's"
    for mean in (0.99, math.nan, math.inf):
        with pytest.raises(ConfigError, match="at least 1"):
            SyntheticAcceptance(mean)


# ---------------------------------------------------------------- with a state


STATEFUL = [
    SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, top_p=0.9, bad_words=((2,), (3, 3)), logit_bias=((1, 1.0),)),
    SamplingParams(temperature=2.0, top_k=3, constraint=one_of([2, 0, 3], [2, 3, 1], [1, 1, 1], [3, 2])),
    SamplingParams(temperature=1.5, min_p=0.1, allowed_token_ids=(0, 2, 3), frequency_penalty=-0.8),
    SamplingParams(temperature=1.5, min_tokens=2, constraint=one_of([2, 0, 1], [2, 3, 1], [0, 2, 2])),
]
STOPS = (0,)


def drafted(
    head: Tensor | None, num_draft: int, tokens: list[int], state: SamplingState, sampling: SamplingParams, index: int
) -> tuple[list[int], Tensor | None]:
    """Drafts as a draft head draws them, and the logits they were drawn from; `state` is left as it was."""
    drafts, rows = list[int](), list[Tensor]()
    for at in range(num_draft):
        row = None if head is None else state.edit(head[[*tokens, *drafts][-1]])
        if head is not None and row is None:
            break
        if row is not None:
            rows.append(row.float())
            drafts.append(draw_draft(rows[-1], sampling, index + at))
            state.push(drafts[-1])
        else:
            drafts.append((index + at) % VOCAB)  # a guess that nobody drew, which may be ruled out
    state.pop(len(rows))
    return drafts, None if head is None else torch.stack(rows) if rows else torch.empty(0, VOCAB)


def generate_with(head: Tensor | None, num_draft: int, length: int, sampling: SamplingParams) -> tuple[list[int], str | None]:
    """As `generate`, by a state over the prompt [0]; ends where the state does."""
    context = b"\0\0\0\0" if sampling.reads_prompt else b""
    item = StepItem(1, 0, 1, b"", (), True, sampling=sampling, context=context, stop_token_ids=STOPS)
    state, tokens = SamplingState(item, VOCAB, compile_words), [0]
    while len(tokens) <= length and state.finish is None:
        index = len(tokens) - 1
        drafts, logits = drafted(head, num_draft, tokens, state, sampling, index)
        tokens += verify(TARGET[torch.tensor([tokens[-1], *drafts])], drafts, logits, sampling, index, state)
    return tokens[1 : length + 1], state.finish


@pytest.mark.parametrize(("head", "num_draft"), [(None, 0), ("other", 1), ("other", 3), ("sharper", 2), (None, 2)])
@pytest.mark.parametrize("sampling", STATEFUL)
def test_every_prefix_follows_the_law_of_the_changed_target_within_five_sigma_and_by_chi_square(
    sampling: SamplingParams, head: str | None, num_draft: int
) -> None:
    number, length = 500, 3
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(number):
        drawn = structs.replace(sampling, seed=seed)
        tokens, _ = generate_with(None if head is None else HEADS[head], num_draft, length, drawn)
        counts.update(tuple(tokens[:end]) for end in range(1, len(tokens) + 1))
    for end in range(1, length + 1):
        cells = []
        for prefix in product(range(VOCAB), repeat=end):
            rows = [TARGET[before].tolist() for before in (0, *prefix)]
            share = math.prod(naive_law(rows[at], sampling, (0,), prefix[:at], STOPS)[token] for at, token in enumerate(prefix))
            assert abs(counts[prefix] - number * share) <= 5 * math.sqrt(number * share * (1 - share)) + 1e-9, prefix
            if number * share >= 5:
                cells.append((counts[prefix], number * share))
        assert sum((count - expected) ** 2 / expected for count, expected in cells) <= chi_square_bound(len(cells))


@pytest.mark.parametrize("num_draft", range(5))
@pytest.mark.parametrize("sampling", STATEFUL)
def test_greedy_output_with_a_state_equals_that_without_drafts(sampling: SamplingParams, num_draft: int) -> None:
    greedy = structs.replace(sampling, temperature=0.0)
    plain = generate_with(None, 0, 9, greedy)
    for head in (TARGET, HEADS["other"], -TARGET, None):
        assert generate_with(head, num_draft, 9, greedy) == plain
    if sampling.constraint is not None:
        assert plain[0] in words_of(sampling.constraint) and plain[1] == "stop"


@pytest.mark.parametrize("num_draft", range(4))
def test_an_illegal_draft_is_never_accepted_and_output_ends_with_the_constraint(num_draft: int) -> None:
    words = [[2, 0, 3], [2, 3, 1], [3, 2]]
    for seed in range(40):
        sampling = SamplingParams(temperature=2.0, seed=seed, constraint=one_of(*words))
        for head in (HEADS["disjoint"], None):
            tokens, finish = generate_with(head, num_draft, 9, sampling)
            assert tokens in words and finish == "stop"


def test_a_dead_end_leaves_the_tokens_before_it() -> None:
    sampling = SamplingParams(constraint=one_of([2, 0, 3]), allowed_token_ids=(0, 2))
    assert generate_with(None, 0, 9, sampling) == ([2, 0], CONSTRAINT_DEAD_END)
    assert generate_with(TARGET, 3, 9, sampling) == ([2, 0], CONSTRAINT_DEAD_END)
