"""From logits to a token. A draw is named by (seed, output index), so it depends on nothing that shares the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.base.request import SamplingParams
from rackserve.base.rng import draw_unit
from rackserve.base.step import StepItem, TokenLogprobs


def sample(logits: Tensor, sampling: SamplingParams, output_index: int) -> int:
    """A token id drawn from `logits` [vocab], not all of them minus infinity. Temperature 0 takes the likeliest, the lowest id
    among equals.

    min_p keeps what is at least this part as likely as the likeliest, then top_k the k likeliest (0 = all), then top_p the
    fewest likeliest whose share reaches top_p.
    """
    return draw_token(logits, sampling, "sample", output_index)


def draw_token(logits: Tensor, sampling: SamplingParams, purpose: str, output_index: int) -> int:
    """As `sample`, by the draw named (purpose, seed, output index): draws for different purposes are independent."""
    if sampling.temperature <= 0.0:
        return int(logits.numpy().argmax())  # torch takes ten times as long
    kept = _filtered(logits, sampling)
    at = draw_at(kept.shares, draw_unit(purpose, sampling.seed, output_index))
    return at if kept.ids is None else int(kept.ids[at])


class Picks(NamedTuple):
    """The likeliest token of each row of logits, the lowest id among equals, and its logit.

    A NaN counts as the largest: where that logit is finite, the row has neither a NaN nor plus infinity.
    """

    tokens: Sequence[int]
    logits: Sequence[float]


def likeliest(logits: Tensor) -> Picks:
    """Of logits [n, vocab]."""
    rows = logits.numpy()
    tokens = rows.argmax(-1)  # torch takes ten times as long
    return Picks(tokens.tolist(), rows[range(len(rows)), tokens].tolist())


def is_likeliest(item: StepItem) -> bool:
    """Whether all that an item which samples wants of its logits is the likeliest token."""
    return item.sampling.temperature <= 0.0 and item.logprobs < 0 and not item.sampling.changes_logits


def probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The law `sample` draws from: float64 [vocab], zero where temperature or filters leave nothing, sum 1 to rounding."""
    law = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    if sampling.temperature <= 0.0:
        law[logits.argmax()] = 1.0
        return law
    kept = _filtered(logits, sampling)
    share = kept.weights / kept.shares[-1]
    if kept.ids is None:
        return share
    law[kept.ids] = share
    return law


def draw_at(shares: Tensor, unit: float) -> int:
    """The index that `unit` in [0, 1) falls on, where `shares` [n] are running sums of weights, the last above 0."""
    draw = unit * float(shares[-1])
    return min(int(torch.searchsorted(shares, draw, right=True)), len(shares) - 1)


class _Kept(NamedTuple):
    """What the filters keep: weights and their running sums, float64 [kept], and token ids; None: every id, in order."""

    weights: Tensor
    shares: Tensor
    ids: Tensor | None


def _filtered(logits: Tensor, sampling: SamplingParams) -> _Kept:
    # The shift by the maximum comes first: a tiny temperature then gives zeros and minus infinities, never NaN.
    scaled, ids = (logits.double() - logits.max()) / sampling.temperature, None
    if sampling.min_p > 0.0:
        ids = (scaled.exp() >= min(sampling.min_p, 1.0)).nonzero().flatten()  # the likeliest has weight 1
        scaled = scaled[ids]
    if 0 < sampling.top_k < len(scaled):
        scaled, order = (found[: sampling.top_k] for found in _likeliest(scaled, sampling.top_k))
        need = scaled.exp().sum() * sampling.top_p
    elif sampling.top_p < 1.0:
        need = scaled.exp().sum() * sampling.top_p
        scaled, order = _likeliest_share(scaled, need)
    else:
        weights = scaled.exp()
        return _Kept(weights, weights.cumsum(0), ids)
    ids = order if ids is None else ids[order]
    weights = scaled.exp()
    shares = weights.cumsum(0)
    kept = len(weights) if sampling.top_p >= 1.0 else int(torch.searchsorted(shares, need)) + 1
    return _Kept(weights[:kept], shares[:kept], ids[:kept])


FIRST_SHARE = 256
"""Tokens among which the fewest that make up a share are looked for first."""


def _likeliest_share(scaled: Tensor, need: Tensor) -> tuple[Tensor, Tensor]:
    """Enough of the likeliest that their weights come to `need`, as `_likeliest` gives them; all if rounding leaves none."""
    count = FIRST_SHARE
    while True:
        values, order = _likeliest(scaled, count)
        if len(values) == len(scaled) or bool(values.exp().sum() > need):
            return values, order
        count *= 8


def _likeliest(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """At least the `count` largest of `scaled` [n] and where they are, largest first and the first among equals first.

    A partial pass and a sort of what it leaves: to sort a whole vocabulary takes longer than a small model's step.
    """
    if 4 * count >= len(scaled):
        values, order = scaled.sort(descending=True, stable=True)
        return values, order
    least = scaled.topk(count, sorted=False).values.min()
    among = (scaled >= least).nonzero().flatten()
    values, order = scaled[among].sort(descending=True, stable=True)
    return values, among[order]


def token_logprobs(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probability of `token` under `logits` [vocab] before temperature and filters, and the `num_top` best alternatives."""
    scores = logits.log_softmax(-1)
    top = scores.topk(min(num_top, len(scores)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(float(scores[token]), tuple(pairs))


SCORED_ROWS = 64
"""Rows of logits that are in memory at once while a prompt is scored."""


def score(tokens: Sequence[int], num_top: int, logits_of: Callable[[int, int], Tensor]) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of `tokens`, token i by row i; `logits_of(first, end)` computes rows [end - first, vocab].

    InvariantError where logits are not finite.
    """
    found: list[TokenLogprobs] = []
    for first in range(0, len(tokens), SCORED_ROWS):
        part = tokens[first : first + SCORED_ROWS]
        rows = logits_of(first, first + len(part))
        if not bool(rows.isfinite().all()):
            raise InvariantError(
                "logits of a prompt are not finite; the weights hold numbers that are not (fetch them again), "
                "or a block was read before its KV was written"
            )
        found += [token_logprobs(row, token, num_top) for row, token in zip(rows, part, strict=True)]
    return tuple(found)
