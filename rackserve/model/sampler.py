"""From logits to a token. A draw is named by (seed, output index), so it depends on nothing that shares the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from rackserve.base.request import SamplingParams
from rackserve.base.rng import draw_unit
from rackserve.base.step import TokenLogprobs


def sample(logits: Tensor, sampling: SamplingParams, output_index: int) -> int:
    """A token id drawn from `logits` [vocab], finite. Temperature 0 takes the likeliest, the lowest id among equals.

    top_k keeps the k likeliest (0 = all); top_p then keeps the fewest likeliest whose share reaches top_p.
    """
    if sampling.temperature <= 0.0:
        return int(logits.argmax())
    # The shift by the maximum comes first: a tiny temperature then gives zeros and minus infinities, never NaN.
    scaled = (logits.double() - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(logits) or sampling.top_p < 1.0:
        scaled, ids = scaled.sort(descending=True, stable=True)
        if sampling.top_k > 0:
            scaled, ids = scaled[: sampling.top_k], ids[: sampling.top_k]
    else:
        ids = None
    shares = scaled.exp().cumsum(0)
    if sampling.top_p < 1.0:
        kept = int(torch.searchsorted(shares, shares[-1] * sampling.top_p)) + 1
        shares = shares[:kept]
    draw = draw_unit("sample", sampling.seed, output_index) * float(shares[-1])
    at = min(int(torch.searchsorted(shares, draw, right=True)), len(shares) - 1)
    return at if ids is None else int(ids[at])


def token_logprobs(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probability of `token` under `logits` [vocab] before temperature and filters, and the `num_top` best alternatives."""
    scores = logits.log_softmax(-1)
    top = scores.topk(min(num_top, len(scores)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(float(scores[token]), tuple(pairs))
