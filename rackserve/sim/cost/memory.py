"""What one chip of a set-up holds, line by line, and how many sequences still fit."""

from __future__ import annotations

import msgspec

from rackserve.base.errors import ResourceError
from rackserve.sim.cost.setup import Setup

USABLE = 0.9
"""Share of a chip's memory that engines plan with by default; the rest is taken by drivers, graphs and fragments."""


class Line(msgspec.Struct, frozen=True):
    """One part of a chip's memory, and what makes it smaller."""

    name: str
    num_bytes: float
    remedy: str


class Budget(msgspec.Struct, frozen=True):
    """What a chip holds at all times, and what each running sequence adds.

    capacity_bytes  what may be planned with
    """

    who: str
    capacity_bytes: float
    lines: tuple[Line, ...]

    @property
    def left_bytes(self) -> float:
        """What the lines leave. ResourceError naming the first that does not fit."""
        left = self.capacity_bytes
        for line in self.lines:
            if line.num_bytes > left:
                raise ResourceError(
                    f"{self.who}: no room for {line.name}: {line.num_bytes:,.0f} bytes, but {max(left, 0):,.0f} of "
                    f"{self.capacity_bytes:,.0f} are left; {line.remedy}"
                )
            left -= line.num_bytes
        return left

    def most_sequences(self, sequence_bytes: float) -> int:
        """How many sequences of `sequence_bytes` fit beside all lines."""
        return int(self.left_bytes // sequence_bytes)


def budget(setup: Setup, activation_bytes: float = 0.0, usable: float = USABLE) -> Budget:
    """The memory of one chip of `setup`: its part of all weights, of tables that chips hold, and `activation_bytes`."""
    model, tp = setup.architecture, setup.tp
    segments = [*model.segments, *([model.draft.segment] if model.draft else [])]
    dense = sum(segment.dense.held(tp) + segment.shared.held(tp) for segment in segments)
    experts = sum(
        segment.num_layers * segment.experts.num * segment.experts.num_bytes for segment in segments if segment.experts
    )
    tables = model.table_bytes / setup.table_shards if setup.table_shards else 0.0
    lines = (
        Line("dense weights", dense, "raise tp"),
        Line("experts", experts / setup.num_chips, "raise ep or tp"),
        Line("embedding and output matrix", model.embedding.held(tp) + model.head.held(tp), "raise tp"),
        Line("tables", tables, "raise table_shards, or set it to 0 to keep the tables in host memory"),
        Line("activations", activation_bytes, "compute fewer tokens in a step"),
    )
    kept = tuple(line for line in lines if line.num_bytes)
    return Budget(f"{setup.chip.name}, {setup.role}", setup.chip.number("memory_bytes") * usable, kept)


def sequence_bytes(setup: Setup, context: float) -> float:
    """Bytes of one sequence of `context` positions on a chip of its rank; rows with fewer heads than chips are held by all."""
    model = setup.architecture
    heads = min(kind.kv_heads for segment in model.segments for kind in segment.attention)
    return model.kv_bytes * context / min(setup.tp, heads) + model.state_bytes


def require_sequences(setup: Setup, num_sequences: int, context: float, activation_bytes: float = 0.0) -> None:
    """ResourceError, naming the line that breaks, unless so many sequences of `context` positions fit on each rank."""
    plan = budget(setup, activation_bytes)
    wanted = num_sequences * sequence_bytes(setup, context)
    if wanted > plan.left_bytes:
        raise ResourceError(
            f"{plan.who}: no room for cached tokens: {num_sequences} sequences of {context:,.0f} take {wanted:,.0f} bytes, but "
            f"{plan.left_bytes:,.0f} of {plan.capacity_bytes:,.0f} are left; at most "
            f"{plan.most_sequences(sequence_bytes(setup, context))} fit"
        )
