"""What one forward pass computes: runs of positions of several sequences, laid behind one another as rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.state import SequenceState


@dataclass(slots=True, eq=False)
class Span:
    """Positions [start, start + count) of one sequence: rows [first, first + count) of the pass.

    replayed    leading positions whose global rows are in the blocks already
    full_from   positions from this one on pass the decoder's layers too
    selected    per row, the numbers of the compressed rows the indexer chose last, ascending, -1 = none: int64 [count, topk]
    candidates  which compressed rows later indexers may choose: bool [count, rows]; None before the candidate source
    keys        index keys of the KV source at hand, unpacked, float32 [rows, dim]
    """

    state: SequenceState
    start: int
    count: int
    first: int
    replayed: int = 0
    full_from: int = 0
    selected: Tensor | None = None
    candidates: Tensor | None = None
    keys: Tensor | None = None
    blocks: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        self.blocks = torch.tensor(self.state.blocks, dtype=torch.int64)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def rows(self) -> slice:
        """Its rows of the pass."""
        return slice(self.first, self.first + self.count)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.start, self.end)

    def visible(self, ratio: int) -> Tensor:
        """How many compressed rows each position may read: int64 [count]."""
        return (self.positions + 1) // ratio


def positions_of(spans: list[Span]) -> Tensor:
    """The positions of all rows of a pass: int64 [T]."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(span.positions for span in spans)])


def tails(spans: list[Span]) -> tuple[list[Span], Tensor]:
    """The spans without the positions before their `full_from`, and which rows of the pass those are: int64 [n]."""
    kept: list[Span] = []
    rows: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    first = 0
    for span in spans:
        skipped = min(max(0, span.full_from - span.start), span.count)
        if skipped == span.count:
            continue
        tail = Span(
            span.state, span.start + skipped, span.count - skipped, first, max(0, span.replayed - skipped), span.full_from
        )
        tail.selected = None if span.selected is None else span.selected[skipped:]
        kept.append(tail)
        rows.append(torch.arange(span.first + skipped, span.first + span.count))
        first += tail.count
    return kept, torch.cat(rows)
