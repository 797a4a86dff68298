"""What kernels make of a chip: shares of its rates, latencies, and how much they keep in flight; sets of them as data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from rackserve.sim.hardware import Value, read_values


class Kernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One set of coefficients. Times are in microseconds.

    memory_efficiency    share of the memory bandwidth that a long read reaches
    overlap              share of the shorter of (loads, products) that hides behind the longer
    decode_rate_share, prefill_rate_share  share of the chip's rate that products reach in a step of either role
    expert_rate_gain     by how much experts' products are faster than that with wider instructions
    launch_us            each product of a layer, besides its bytes and operations
    sparse_attention_us, dense_attention_us  an attention kernel with and without selected rows, at the least
    gather_us            one block of selected rows that arrives while nothing else does; `blocks_in_flight` of them overlap
    boundary_us          mixing of residual streams at the end of a layer, at the least
    alltoall_us, allreduce_us, cross_tray_us  one exchange without bytes; what an all-reduce over trays takes more
    prefill_base_us, decode_base_us  a step with tokens besides its operators
    prefill_floor_us     any prefill step with tokens, at the least
    weight_stages, stage_bytes, memory_latency_us  reads of weights in flight per core, their size, and how long each takes
    far_share            bandwidth of reads from both memory domains, in parts of local ones
    local_experts, local_residuals  1 if experts' columns, or residual stripes, are read by the cores that are near; else 0
    early_rows_us        what gathers of a layer take less because they start under the kernel before
    inline_rows          up to so many rows the shared expert is computed inside the routed ones, without products of its own
    """

    memory_efficiency: Value
    overlap: Value
    decode_rate_share: Value
    prefill_rate_share: Value
    expert_rate_gain: Value
    launch_us: Value
    sparse_attention_us: Value
    dense_attention_us: Value
    gather_us: Value
    blocks_in_flight: Value
    boundary_us: Value
    alltoall_us: Value
    allreduce_us: Value
    cross_tray_us: Value
    prefill_base_us: Value
    prefill_floor_us: Value
    decode_base_us: Value
    weight_stages: Value
    stage_bytes: Value
    memory_latency_us: Value
    far_share: Value
    local_experts: Value
    local_residuals: Value
    early_rows_us: Value
    inline_rows: Value

    def number(self, name: str) -> float:
        """The number of coefficient `name`."""
        value: Value = getattr(self, name)
        return value.get(name)


@cache
def kernel_sets() -> Mapping[str, Kernels]:
    """All sets by name; `Chip.kernels` names a chip's own."""
    return read_values("kernels.toml", "kernels", Kernels)
