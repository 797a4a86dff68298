"""Which drafted tokens stand. Whatever the drafts, the output follows the law of drawing from the target alone.

Tokens per step always counts the token that no draft gave: it is 1 where every draft fails, k + 1 where all of k stand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.request import SamplingParams
from rackserve.base.rng import draw_unit
from rackserve.model.sampler import draw_at, draw_token, probabilities, sample
from rackserve.model.sampling_state import SamplingState


def draw_draft(logits: Tensor, sampling: SamplingParams, output_index: int) -> int:
    """A draft for output `output_index` from a draft head's `logits` [vocab], under the filters of the request."""
    return draw_token(logits, sampling, "draft", output_index)


def verify(
    target_logits: Tensor,
    drafts: Sequence[int],
    draft_logits: Tensor | None,
    sampling: SamplingParams,
    output_index: int,
    state: SamplingState | None = None,
) -> list[int]:
    """The 1..k+1 tokens that `drafts` (k of them) turn into: those that stand, then one drawn from the target.

    target_logits  [k + 1, vocab]: row i is the target's for output `output_index` + i, given the drafts before it
    draft_logits   [k, vocab]: what `draw_draft` drew from. None: nobody drew, and each draft is taken for a certainty of
                   its head; it must then not depend on any draw of this request at its own output or later
    state          changes each row of the target by the tokens before it, and takes in what is drawn. Draft logits come as they
                   were drawn from. Where it finishes, nothing more is drawn: there may be fewer tokens then, or none

    Temperature 0 keeps drafts as long as they are what `sample` takes. Else a draft stands with chance min(1, p / q), p and q
    its probabilities in target and draft head; in place of one that fails comes a draw from what p has above q, and later
    drafts are dropped. Exact only if whether a draft is among `drafts` did not depend on that draft itself.
    """
    if len(target_logits) != len(drafts) + 1 or (draft_logits is not None and len(draft_logits) != len(drafts)):
        shapes = f"target {tuple(target_logits.shape)}, draft {None if draft_logits is None else tuple(draft_logits.shape)}"
        raise InvariantError(f"{len(drafts)} drafts need as many rows of draft logits and one more of target logits: {shapes}")
    tokens: list[int] = []
    for at, target in enumerate(target_logits):
        row = target if state is None else state.edit(target)
        if row is None:
            break
        draft = drafts[at] if at < len(drafts) else None
        if draft is None:
            token = sample(row, sampling, output_index + at)
        else:
            token = _judge(row, draft, None if draft_logits is None else draft_logits[at], sampling, output_index + at)
        tokens.append(token)
        if state is not None:
            state.push(token)
        if token != draft:
            break
    return tokens


def _judge(target: Tensor, draft: int, guess: Tensor | None, sampling: SamplingParams, output_index: int) -> int:
    """`draft` if it stands, else the token that comes in its place, which is another."""
    if sampling.temperature <= 0.0:
        return sample(target, sampling, output_index)
    p = probabilities(target, sampling)
    if guess is None:
        q = torch.zeros_like(p)
        q[draft] = 1.0
    else:
        q = probabilities(guess, sampling)
    if draw_unit("accept", sampling.seed, output_index) * float(q[draft]) < float(p[draft]):
        return draft
    return draw_at(remainder(p, q).cumsum(0), draw_unit("instead", sampling.seed, output_index))


def remainder(p: Tensor, q: Tensor) -> Tensor:
    """What `p` has above `q`, not normalised; `p` itself where rounding leaves nothing. Both [vocab], float64."""
    above = (p - q).clamp(min=0.0)
    return above if bool(above.any()) else p


class SyntheticAcceptance(msgspec.Struct, frozen=True):
    """Makes a run with drafts comparable: each step yields tokens by a fixed mean, whatever the model thinks of the drafts.

    mean_tokens_per_step  at least 1; a run must refuse one above its number of drafts + 1, which no step can reach
    """

    mean_tokens_per_step: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1.0 <= self.mean_tokens_per_step < math.inf:
            raise ConfigError(f"mean_tokens_per_step is {self.mean_tokens_per_step}: give at least 1 (1 = no draft stands)")

    def num_tokens(self, sequence: str | int, output_index: int, num_drafts: int) -> int:
        """Tokens of the step of `sequence` (any name of it) that begins at `output_index`: 1..num_drafts + 1.

        Either whole number beside the mean, by a draw of that name; fewer only where there are not as many drafts.
        """
        whole = math.floor(self.mean_tokens_per_step)
        more = draw_unit("synthetic", self.seed, sequence, output_index) < self.mean_tokens_per_step - whole
        return min(whole + more, num_drafts + 1)

    @property
    def label(self) -> str:
        """What has to stand beside every figure and text of such a run."""
        return f"synthetic acceptance {self.mean_tokens_per_step:g}: output tokens are not the model's"
