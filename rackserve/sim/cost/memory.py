"""What one chip of a set-up holds, line by line, and how many sequences still fit."""

from __future__ import annotations

from math import ceil

import msgspec

from rackserve.base.errors import ResourceError
from rackserve.base.memory_plan import USABLE, Line, MemoryPlan
from rackserve.sim.cost.setup import Setup


class Budget(msgspec.Struct, frozen=True):
    """What a chip holds at all times, of the `capacity_bytes` that may be planned with."""

    plan: MemoryPlan
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        return self.plan.total_bytes <= self.capacity_bytes

    def require_fit(self) -> None:
        """ResourceError naming the first line that does not fit."""
        self.plan.require_fit(self.capacity_bytes)

    @property
    def left_bytes(self) -> int:
        """What the plan leaves. ResourceError as from `require_fit`."""
        self.require_fit()
        return self.capacity_bytes - self.plan.total_bytes

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
    parts = (
        ("dense weights", dense, "raise tp"),
        ("experts", experts / setup.num_chips, "raise ep or tp"),
        ("embedding and output matrix", model.embedding.held(tp) + model.head.held(tp), "raise tp"),
        ("tables", tables, "raise table_shards, or set it to 0 to keep the tables in host memory"),
        ("activations", activation_bytes, "compute fewer tokens in a step"),
    )
    lines = tuple(Line(name, ceil(size), remedy) for name, size, remedy in parts if size)
    capacity = int(setup.chip.number("memory_bytes") * usable)
    return Budget(MemoryPlan(f"{setup.chip.name}, {setup.role}", lines), capacity)


def sequence_bytes(setup: Setup, context: float) -> float:
    """Bytes of one sequence of `context` positions on a chip of its rank; rows with fewer heads than chips are held by all."""
    model = setup.architecture
    heads = min(kind.kv_heads for segment in model.segments for kind in segment.attention)
    return model.kv_bytes * context / min(setup.tp, heads) + model.state_bytes


def require_sequences(setup: Setup, num_sequences: int, context: float, activation_bytes: float = 0.0) -> None:
    """ResourceError, naming the line that breaks, unless so many sequences of `context` positions fit on each rank."""
    memory = budget(setup, activation_bytes)
    wanted = num_sequences * sequence_bytes(setup, context)
    if wanted > memory.left_bytes:
        raise ResourceError(
            f"{memory.plan.who}: no room for cached tokens: {num_sequences} sequences of {context:,.0f} take {wanted:,.0f} "
            f"bytes, but {memory.left_bytes:,} of {memory.capacity_bytes:,} are left; at most "
            f"{memory.most_sequences(sequence_bytes(setup, context))} fit"
        )
