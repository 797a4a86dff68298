from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.base.request import SamplingParams
from rackserve.base.step import StepItem
from rackserve.model.sampler import (
    SCORED_ROWS,
    draw_token,
    is_likeliest,
    likeliest,
    probabilities,
    sample,
    score,
    token_logprobs,
)

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -30.0])


def law(logits: Tensor, temperature: float, kept: list[int]) -> dict[int, float]:
    """Share of each kept token."""
    weights = {token: math.exp(float(logits[token]) / temperature) for token in kept}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def test_temperature_zero_takes_the_likeliest_and_the_lowest_id_among_equals() -> None:
    assert sample(LOGITS, SamplingParams(seed=3), 9) == 0
    assert sample(torch.tensor([1.0, 4.0, 4.0]), SamplingParams(), 0) == 1


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(temperature=1.0), [0, 1, 2, 3]),
        (SamplingParams(temperature=2.0), [0, 1, 2, 3]),
        (SamplingParams(temperature=0.5), [0, 1, 2, 3]),
        (SamplingParams(temperature=1.0, top_k=2), [0, 3]),
        (SamplingParams(temperature=1.0, top_k=99), [0, 1, 2, 3]),
        (SamplingParams(temperature=1.0, top_p=0.8), [0, 3]),
        (SamplingParams(temperature=1.0, top_p=0.01), [0]),
        (SamplingParams(temperature=2.0, top_k=3, top_p=0.99), [0, 2, 3]),
        (SamplingParams(temperature=1.0, top_k=1), [0]),
        (SamplingParams(temperature=1.0, min_p=0.2), [0, 2, 3]),
        (SamplingParams(temperature=0.5, min_p=0.2), [0, 3]),  # shares are those at the temperature
        (SamplingParams(temperature=2.0, min_p=0.2, top_k=3, top_p=0.7), [0, 3]),
        (SamplingParams(temperature=1.0, min_p=1.0), [0]),
    ],
)
def test_draws_follow_the_law_within_five_sigma(sampling: SamplingParams, kept: list[int]) -> None:
    number = 2000
    counts = Counter(sample(LOGITS, sampling, index) for index in range(number))
    shares = law(LOGITS, sampling.temperature, kept)
    assert set(counts) <= set(kept)
    for token, share in shares.items():
        assert abs(counts[token] - number * share) <= 5 * math.sqrt(number * share * (1 - share)) + 1e-9


def test_a_draw_is_named_by_seed_and_output_index_alone() -> None:
    def draws(seed: int) -> list[int]:
        return [sample(LOGITS, SamplingParams(temperature=1.5, seed=seed), index) for index in range(40)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len(set(draws(1))) > 1


def test_a_tiny_temperature_is_greedy_not_nan() -> None:
    for sampling in (SamplingParams(temperature=1e-7, seed=4), SamplingParams(temperature=1e-300, top_p=0.5, top_k=3)):
        assert {sample(LOGITS * 10, sampling, index) for index in range(20)} == {0}


def test_logprobs_are_of_the_plain_distribution_best_first() -> None:
    shares = law(LOGITS, 1.0, list(range(5)))
    found = token_logprobs(LOGITS, 2, 3)
    assert found.logprob == pytest.approx(math.log(shares[2]), abs=1e-5)
    assert [token for token, _ in found.top] == [0, 3, 2]
    assert [value for _, value in found.top] == pytest.approx([math.log(shares[token]) for token in (0, 3, 2)], abs=1e-5)
    assert token_logprobs(LOGITS, 2, 0).top == ()
    assert len(token_logprobs(LOGITS, 2, 20).top) == 5


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(), [0]),
        (SamplingParams(temperature=2.0), [0, 1, 2, 3, 4]),
        (SamplingParams(temperature=1.0, top_k=2), [0, 3]),
        (SamplingParams(temperature=2.0, top_k=3, top_p=0.99), [0, 2, 3]),
        (SamplingParams(temperature=1e-300, top_p=0.5), [0]),
    ],
)
def test_probabilities_are_the_law_that_draws_follow(sampling: SamplingParams, kept: list[int]) -> None:
    found = probabilities(LOGITS, sampling)
    shares = law(LOGITS - 2, max(sampling.temperature, 1e-3), kept)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([shares.get(token, 0.0) for token in range(5)], rel=1e-6)


def test_draws_for_different_purposes_are_independent() -> None:
    sampling = SamplingParams(temperature=2.0)
    pairs = [tuple(draw_token(LOGITS, sampling, purpose, index) for purpose in ("sample", "draft")) for index in range(2000)]
    assert [first for first, _ in pairs] == [sample(LOGITS, sampling, index) for index in range(2000)]
    shares = law(LOGITS, 2.0, [0, 1, 2, 3])
    same = sum(share**2 for share in shares.values())
    assert abs(sum(a == b for a, b in pairs) - 2000 * same) <= 5 * math.sqrt(2000 * same * (1 - same))


def test_what_is_ruled_out_is_never_drawn() -> None:
    logits = torch.tensor([2.0, -math.inf, 0.5, -math.inf, 1.0])
    for sampling in (SamplingParams(temperature=2.0), SamplingParams(temperature=2.0, top_k=4), SamplingParams(min_p=0.01)):
        assert {sample(logits, sampling, index) for index in range(200)} <= {0, 2, 4}


@pytest.mark.parametrize("number", [0, 1, 64, 65, 200])
def test_a_prompt_is_scored_in_slices_with_the_values_of_single_rows(number: int) -> None:
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(1))
    tokens, asked = [at % 7 for at in range(number)], list[int]()

    def rows(first: int, end: int) -> Tensor:
        asked.append(end - first)
        return logits[first:end]

    found = score(tokens, 2, rows)
    assert found == tuple(token_logprobs(logits[at], token, 2) for at, token in enumerate(tokens))
    assert max(asked, default=0) <= SCORED_ROWS and sum(asked) == number


def test_a_prompt_with_logits_that_are_not_finite_is_not_scored() -> None:
    with pytest.raises(InvariantError, match="not finite"):
        score([1], 0, lambda first, end: torch.full((1, 3), math.nan))


@pytest.mark.parametrize("size", [5, 1_030, 5_000])
@pytest.mark.parametrize("levels", [1, 7, 10_000])
@settings(derandomize=True, max_examples=15, deadline=None)
@given(
    top_k=st.sampled_from([0, 1, 3, 40, 300, 4_999]),
    top_p=st.sampled_from([0.0, 0.3, 0.5, 0.95, 0.999_999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.3]),
    temperature=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_filters_keep_what_a_sort_of_all_tokens_would(
    size: int, levels: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    rng = torch.Generator().manual_seed(size + levels)
    logits = torch.randint(levels, (size,), generator=rng).float() / levels * 12  # many equals where levels are few
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scaled = (logits.double() - logits.max()) / temperature
    values, order = scaled.sort(descending=True, stable=True)
    keep = (values.exp() >= min_p) & (values.exp() > 0)
    values, order = values[keep], order[keep]
    if top_k:
        values, order = values[:top_k], order[:top_k]
    shares = values.exp().cumsum(0)
    short = shares < shares[-1] * top_p * (1 - 1e-12)
    fewest = int(short.sum()) + 1 if top_p < 1 else len(values)
    found = probabilities(logits, sampling)
    kept = int((found > 0).sum())
    assert abs(kept - fewest) <= 1  # a share that is met to the last bit may count either way
    assert set(found.nonzero().flatten().tolist()) <= set(order[: fewest + 1].tolist())
    wanted = values[:kept].exp() / values[:kept].exp().sum()
    assert torch.allclose(found[order[:kept]], wanted, rtol=1e-9)


def test_the_likeliest_of_each_row_is_the_lowest_id_among_equals_and_a_nan_above_all() -> None:
    inf, nan = math.inf, math.nan
    rows = [
        [1.0, 3.0, 3.0, 2.0],
        [-inf, -inf, -inf, -inf],
        [0.0, nan, inf, nan],
        [-inf, 5.0, inf, inf],
        [-inf, -2.0, -9.0, -2.0],
    ]
    found = likeliest(torch.tensor(rows))
    assert list(found.tokens) == [1, 0, 1, 2, 1]
    assert found.logits[:2] == [3.0, -inf] and math.isnan(found.logits[2]) and found.logits[3:] == [inf, -2.0]
    assert likeliest(torch.empty(0, 4)) == ([], [])


@pytest.mark.parametrize(
    ("sampling", "logprobs", "wanted"),
    [
        (SamplingParams(top_p=0.5, top_k=3, min_p=0.1, seed=4), -1, True),
        (SamplingParams(temperature=-1.0), -1, True),
        (SamplingParams(temperature=0.1), -1, False),
        (SamplingParams(), 0, False),
        (SamplingParams(frequency_penalty=0.1), -1, False),
        (SamplingParams(logit_bias=((3, 1.0),)), -1, False),
        (SamplingParams(min_tokens=1), -1, False),
    ],
)
def test_logits_are_read_where_the_likeliest_token_is_not_all_that_is_wanted(
    sampling: SamplingParams, logprobs: int, wanted: bool
) -> None:
    assert is_likeliest(StepItem(1, 0, 1, b"", (), True, sampling=sampling, logprobs=logprobs)) == wanted
