"""DSpark, the speculative head: proposes a block of tokens in one pass over features of accepted positions.

Its windows are filled from what the backbone computed, never from drafts, so a rejected draft leaves no trace in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rackserve.base.request import SamplingParams
from rackserve.model.acceptance import draw_draft
from rackserve.model.deepseek_v41.attention import attend
from rackserve.model.deepseek_v41.backbone import Embedding
from rackserve.model.deepseek_v41.block import Block
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.rotation import Rotation, frequencies
from rackserve.model.deepseek_v41.rounding import unpack_fp8
from rackserve.model.deepseek_v41.state import Proposal, SequenceState
from rackserve.model.deepseek_v41.streams import collapse, first_pre, rms_norm
from rackserve.model.deepseek_v41.weights import Weights
from rackserve.model.parallel import Collectives
from rackserve.model.sampling_state import SamplingState


@dataclass(frozen=True, slots=True)
class Drafting:
    """A sequence to draft for: `anchor` is the token at position `state.length`, `output_index` the number of the next one.

    choice   what drafts are drawn by, beside `sampling`
    """

    state: SequenceState
    anchor: int
    sampling: SamplingParams
    output_index: int
    choice: SamplingState | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens proposed for one sequence, the logits each was drawn from [n, vocab], and confidence logits [n].

    A block of them, or fewer where what was drafted ends the output.
    """

    tokens: list[int]
    logits: Tensor
    confidence: Tensor


class DraftHead(Protocol):
    """The speculative head on one device."""

    def learn(self, proposals: Sequence[Proposal], lasts: Sequence[int]) -> None:
        """Fill in `drafts` of each proposal: the window rows of its first lasts[i] positions, uint8 [stages, n, bytes]."""

    def draft(self, requests: Sequence[Drafting]) -> list[Drafts]:
        """One block for every sequence."""


class DSpark:
    """The stages of the head on one device. Windows of stage s are those of "layer" num_hidden_layers + s."""

    __slots__ = ("_blocks", "_confidence", "_config", "_embedding", "_freqs", "_linear", "_main_norm", "_main_proj", "_markov",
                 "_norm", "_tp_concat")  # fmt: skip

    def __init__(
        self, config: DeepseekV41Config, weights: Weights, embedding: Embedding, linear: Linear, collectives: Collectives
    ) -> None:
        self._config, self._embedding, self._linear = config, embedding, linear
        self._freqs = frequencies(config, compressed=False)
        last = config.num_nextn_predict_layers - 1
        num_experts, top = config.dspark_n_routed_experts, config.dspark_num_experts_per_tok
        self._blocks = [
            Block(config, weights, f"mtp.{stage}", linear, collectives, num_experts, top)
            for stage in range(config.num_nextn_predict_layers)
        ]
        self._main_proj, self._main_norm = weights.matrix("mtp.0.main_proj"), weights.vector("mtp.0.main_norm")
        self._norm, self._markov = weights.vector(f"mtp.{last}.norm"), weights.matrix(f"mtp.{last}.markov_head.head")
        self._confidence = weights.matrix(f"mtp.{last}.confidence_head.proj").right()[:, 0]
        self._tp_concat = collectives.tp_concat

    def learn(self, proposals: Sequence[Proposal], lasts: Sequence[int]) -> None:
        """Fill in `drafts` of each proposal: the window rows of its first lasts[i] positions, uint8 [stages, n, bytes]."""
        count = [min(last, self._config.sliding_window + self._config.dspark_block_size) for last in lasts]
        firsts = [last - number for last, number in zip(lasts, count, strict=True)]
        features = [proposal.features[first:last] for proposal, first, last in zip(proposals, firsts, lasts, strict=True)]
        positions = [
            torch.arange(proposal.start + first, proposal.start + last)
            for proposal, first, last in zip(proposals, firsts, lasts, strict=True)
        ]
        if not features:
            return
        x = rms_norm(self._linear(torch.cat(features), self._main_proj), self._main_norm, self._config.rms_norm_eps)
        rotation = Rotation(self._freqs, torch.cat(positions))
        stages = torch.stack([block.attention.rows(x, rotation) for block in self._blocks])
        parts = stages.split(count, 1)
        for proposal, first, part in zip(proposals, firsts, parts, strict=True):
            rows = stages.new_zeros(len(stages), len(proposal.tokens), stages.shape[2])
            rows[:, first : first + part.shape[1]] = part
            proposal.drafts = rows

    def draft(self, requests: Sequence[Drafting]) -> list[Drafts]:
        """One block for every sequence. Every device of the group must call it, without sequences if it has none."""
        config, size = self._config, self._config.dspark_block_size
        ids = [token for request in requests for token in (request.anchor, *[config.dspark_noise_token_id] * (size - 1))]
        count = len(requests)
        starts = torch.tensor([request.state.length for request in requests], dtype=torch.int64)
        rotation = Rotation(self._freqs, (starts[:, None] + torch.arange(size)).flatten())
        streams = self._embedding.rows("embed", torch.tensor(ids, dtype=torch.int64))
        streams = streams[:, None].repeat(1, config.hc_mult, 1)
        pre = first_pre(count * size, config.hc_mult)
        for stage, block in enumerate(self._blocks):
            x = block.attention_input(streams, pre)
            streams, pre = block.join(streams, x, lambda x, stage=stage: self._attend(stage, x, rotation, requests))  # type: ignore[misc]
        x = collapse(streams, pre)
        base = self._embedding.logits(rms_norm(x, self._norm, config.rms_norm_eps))
        return self._unroll(requests, x.view(count, size, x.shape[1]), base.view(count, size, base.shape[1]))

    def _attend(self, stage: int, x: Tensor, rotation: Rotation, requests: Sequence[Drafting]) -> Tensor:
        """Every row of a block sees its sequence's window and the whole block, in both directions."""
        config, size = self._config, self._config.dspark_block_size
        attention = self._blocks[stage].attention
        queries = attention.query(attention.latent(x), rotation)
        own = attention.rows(x, rotation).unflatten(0, (len(requests), size)) if requests else None
        attended = torch.empty_like(queries)
        for number, request in enumerate(requests):
            assert own is not None
            length = request.state.length
            earlier = torch.arange(length - config.sliding_window, length)
            packed, there = request.state.before(config.num_hidden_layers + stage, earlier)
            rows = unpack_fp8(torch.cat((packed, own[number])), config.head_dim)
            exists = torch.cat((there, torch.ones(size, dtype=torch.bool)))
            rows = rows.masked_fill(~exists[:, None], 0.0).expand(size, -1, -1)
            part = slice(number * size, (number + 1) * size)
            attended[part] = attend(self._linear.products, queries[part], rows, exists.expand(size, -1), attention.sink)
        return attention.output(attended, rotation)

    def _unroll(self, requests: Sequence[Drafting], x: Tensor, logits: Tensor) -> list[Drafts]:
        """Tokens from x [S, block, d] and the head's logits [S, block, vocab]."""
        config, last = self._config, self._config.num_nextn_predict_layers - 1
        confidence = torch.empty(len(requests), config.dspark_block_size)

        def follow(place: int, tokens: Tensor) -> None:
            embedded = self._embedding.rows(f"mtp.{last}.markov_head.embed", tokens)
            logits[:, place] += self._tp_concat(self._linear.plain(embedded, self._markov))
            seen = torch.cat((x[:, place], embedded), -1)
            confidence[:, place] = (seen * self._confidence).sum(-1)

        return unroll(requests, logits, confidence, follow)


def unroll(
    requests: Sequence[Drafting], logits: Tensor, confidence: Tensor, follow: Callable[[int, Tensor], None]
) -> list[Drafts]:
    """Tokens one after the other, each token's logits [S, block, vocab] corrected by the one before it.

    follow  corrects the logits of a place of the block and sets its confidence [S, block], given the tokens before, int64 [S]
    """
    tokens = torch.tensor([request.anchor for request in requests], dtype=torch.int64)
    drawn: list[list[int]] = [[] for _ in requests]
    for place in range(logits.shape[1]):
        follow(place, tokens)
        for number, (request, found) in enumerate(zip(requests, drawn, strict=True)):
            token = _draw(request, logits[number, place], place) if len(found) == place else None
            if token is not None:
                found.append(token)
                tokens[number] = token
    for request, found in zip(requests, drawn, strict=True):
        if request.choice is not None:
            request.choice.pop(len(found))
    counts = [len(found) for found in drawn]
    return [
        Drafts(found, logits[number, :count], confidence[number, :count])
        for number, (found, count) in enumerate(zip(drawn, counts, strict=True))
    ]


def _draw(request: Drafting, logits: Tensor, place: int) -> int | None:
    """The draft for `place` of the block, pushed to the request's choice, which changes `logits`; None if none may follow."""
    choice = request.choice
    if choice is None:
        return draw_draft(logits, request.sampling, request.output_index + place)
    edited = choice.edit(logits)
    if edited is None:
        return None
    logits.copy_(edited)
    token = draw_draft(logits, request.sampling, request.output_index + place)
    choice.push(token)
    return token
