"""The Engram rows of a step: asked for as soon as its token ids are known, read while earlier work runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.engram.ngrams import NgramHash
from rackserve.model.deepseek_v41.engram.reader import EngramReader, PendingRows


class StepReads:
    """The Engram rows of a forward pass: those of the ids of a step's items, and of their drafts once those are drawn."""

    __slots__ = ("_hash", "_late", "_lengths", "_reader", "_soon", "_tokens")

    def __init__(
        self, ngrams: NgramHash, reader: EngramReader, tokens: Sequence[list[int]], histories: Sequence[list[int]]
    ) -> None:
        """`tokens`: each item's ids; `histories`: the last ids before each."""
        self._hash, self._reader = ngrams, reader
        self._tokens = [(history, ids) for history, ids in zip(histories, tokens, strict=True)]
        self._lengths = [(len(ids), 0) for ids in tokens]
        self._soon = reader.begin(ngrams.addresses(self._tokens))
        self._late: PendingRows | None = None

    def extend(self, drafts: Sequence[Sequence[int]]) -> None:
        """Ask for the rows of the drafts that follow each item, none for most."""
        if any(drafts):
            follow = [([*history, *ids], more) for (history, ids), more in zip(self._tokens, drafts, strict=True)]
            self._late = self._reader.begin(self._hash.addresses(follow))
            self._lengths = [(len(ids), len(more)) for (_, ids), more in zip(self._tokens, drafts, strict=True)]

    def rows(self, layer: int) -> Tensor:
        """Float32 [T, columns * engram_head_dim]: each item's ids, then its drafts. ResourceError if they do not come."""
        soon = self._soon.rows(layer)
        if self._late is None:
            return soon
        early = soon.split([length for length, _ in self._lengths])
        late = self._late.rows(layer).split([length for _, length in self._lengths])
        return torch.cat([part for pair in zip(early, late, strict=True) for part in pair])
