"""How long steps take: the terms of all segments, head and draft, added up for the slowest rank of a group."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.sim.cost.load import StepLoad
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.terms import Share, Term, segment_terms
from rackserve.sim.fabric import FIELDS


class StepModel:
    """Step times of one set-up. Ranks of a group wait for the slowest; experts work for all ranks' tokens together."""

    __slots__ = ("setup",)

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def terms(self, loads: Sequence[StepLoad]) -> tuple[Term, ...]:
        """Terms of the slowest rank, largest first. `loads` has one entry per rank, or one that all ranks have alike."""
        ranks = self._ranks(loads)
        each = (self._rank_terms(load, ranks) for load in dict.fromkeys(ranks))
        slowest = max(each, key=lambda terms: sum(term.seconds for term in terms))
        return tuple(sorted(slowest, key=lambda term: -term.seconds))

    def seconds(self, loads: Sequence[StepLoad]) -> float:
        """Duration of a group's step."""
        total = sum(term.seconds for term in self.terms(loads))
        if self.setup.role == "prefill" and any(load.tokens for load in loads):
            return max(total, self.setup.prefill_floor_s)
        return total

    def _ranks(self, loads: Sequence[StepLoad]) -> list[StepLoad]:
        ranks = list(loads) * self.setup.ep if len(loads) == 1 else list(loads)
        if len(ranks) != self.setup.ep:
            raise ConfigError(f"a step of {len(ranks)} ranks does not fit a group of ep {self.setup.ep}")
        return ranks

    def _rank_terms(self, load: StepLoad, ranks: Sequence[StepLoad]) -> list[Term]:
        setup = self.setup
        model, busy = setup.architecture, any(rank.tokens for rank in ranks)
        found: list[Term] = []
        for segment in model.segments:
            tokens, group = load.tokens, sum(rank.tokens for rank in ranks)
            if segment.tail_only:
                tokens, group = load.tail_tokens, sum(rank.tail_tokens for rank in ranks)
                if busy and not group:
                    continue  # no prompt ends in this step, so nobody runs these layers
            found += segment_terms(segment, Share(setup, load, group), tokens)
        found.append(self._head(load, load.num_sequences if setup.role == "prefill" else load.tokens))
        if model.draft and setup.role == "decode":
            found.append(self._draft(load, ranks))
        if model.table_row_bytes:
            found.append(self._tables(load))
        name = f"{setup.role}_base_us"
        base = setup.kernels.number(name) * 1e-6 if busy else 0.0
        found.append(Term("step base", base, "latency", coefficients=(name,)))
        return [msgspec.structs.replace(term, seconds=term.seconds * setup.time_factor) for term in merged(found)]

    def _head(self, load: StepLoad, rows: float) -> Term:
        """The output matrix over `rows` positions."""
        setup = self.setup
        head = setup.architecture.head
        num_bytes, num_flops = head.held(setup.tp), 2 * rows * head.parameters / setup.tp
        rate = setup.bytes_per_s * setup.spread_share
        seconds, bound = Share(setup, load, 0).roofline(num_bytes, num_flops, "bf16", rate)
        used = ("memory_efficiency", "far_share", f"{setup.role}_rate_share", "overlap")
        return Term("output matrix", seconds, bound, num_bytes, num_flops, used)

    def _draft(self, load: StepLoad, ranks: Sequence[StepLoad]) -> Term:
        """One pass of the speculative head over a block of each sequence, and its logits."""
        draft = self.setup.architecture.draft
        assert draft is not None
        rows = load.num_sequences * draft.block
        own = StepLoad(load.num_sequences, rows, rows, load.context_tokens, rows * load.mean_context)
        group = sum(rank.num_sequences for rank in ranks) * draft.block
        parts = [*segment_terms(draft.segment, Share(self.setup, own, group), rows), self._head(own, rows)]
        longest = max(parts, key=lambda term: term.seconds)
        return Term(
            "draft head",
            sum(term.seconds for term in parts),
            longest.bound,
            sum(term.num_bytes for term in parts),
            sum(term.num_flops for term in parts),
            tuple(dict.fromkeys(name for term in parts for name in term.coefficients)),
        )

    def _tables(self, load: StepLoad) -> Term:
        """Rows of the model's tables, from the chips that share them or from the host."""
        setup = self.setup
        num_bytes = load.tokens * setup.architecture.table_row_bytes
        if setup.table_shards:
            seconds = num_bytes * (setup.table_shards - 1) / setup.table_shards / setup.chip.number(FIELDS["link"])
        else:
            seconds = num_bytes / setup.chip.number(FIELDS["host"])
        latency = setup.kernels.number("alltoall_us") * 1e-6
        return Term(
            "table rows", latency + seconds, "link" if seconds > latency else "latency", num_bytes, 0.0, ("alltoall_us",)
        )


def merged(terms: Sequence[Term]) -> list[Term]:
    """One term per name: seconds, bytes and operations added, the bound of the longest."""
    groups: dict[str, list[Term]] = {}
    for term in terms:
        groups.setdefault(term.name, []).append(term)
    return [
        msgspec.structs.replace(
            max(group, key=lambda term: term.seconds),
            seconds=sum(term.seconds for term in group),
            num_bytes=sum(term.num_bytes for term in group),
            num_flops=sum(term.num_flops for term in group),
        )
        for group in groups.values()
    ]
