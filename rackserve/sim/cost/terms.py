"""The operators of one segment of layers as named terms: bytes, operations and latencies over given rates."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

import msgspec

from rackserve.sim.cost.architecture import Segment
from rackserve.sim.cost.load import StepLoad
from rackserve.sim.cost.setup import Setup
from rackserve.sim.fabric import allreduce_s, alltoall_s
from rackserve.sim.hardware import Math

Bound = Literal["memory", "products", "latency", "link"]

GATHER_ROWS = 64
"""Selected rows that an attention kernel asks for at once."""

ACTIVATION_BYTES = {"dispatch": 1, "combine": 2, "reduce": 2}
"""Bytes per channel of an activation that is exchanged."""


class Term(msgspec.Struct, frozen=True):
    """One part of a step's time, over all layers.

    bound         what takes most of it
    coefficients  names of the kernel coefficients that it depends on
    """

    name: str
    seconds: float
    bound: Bound
    num_bytes: float = 0.0
    num_flops: float = 0.0
    coefficients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a group's step.

    group_tokens  positions that pass the segment on all ranks of the group together
    """

    setup: Setup
    load: StepLoad
    group_tokens: float

    def roofline(
        self, num_bytes: float, num_flops: float, math: Math, bytes_per_s: float, gain: float = 1.0
    ) -> tuple[float, Bound]:
        """Seconds of loads and products that overlap as far as kernels let them."""
        setup = self.setup
        loads, products = num_bytes / bytes_per_s, num_flops / (setup.chip.flops(math) * setup.rate_share * gain)
        longer, shorter = max(loads, products), min(loads, products)
        return longer + (1 - setup.kernels.number("overlap")) * shorter, "memory" if loads >= products else "products"


def touched(num: int, top: int, local: float, tokens: float) -> float:
    """Expected number of `local` experts out of `num` that any of `tokens` tokens picks, each `top` of them, all alike."""
    return local * (1 - float((1 - top / num) ** tokens))


def segment_terms(segment: Segment, share: Share, tokens: float) -> list[Term]:
    """Terms of a segment that `tokens` positions of this rank pass."""
    terms = [_dense(segment, share, tokens), _launches(segment, share, tokens), _attention(segment, share, tokens)]
    if segment.experts:
        terms.append(_experts(segment, share))
    if segment.indexers:
        terms.append(_indexers(segment, share, tokens))
    if segment.stream_bytes:
        terms.append(_streams(segment, share, tokens))
    return terms + _exchanges(segment, share, tokens)


def _dense(segment: Segment, share: Share, tokens: float) -> Term:
    setup = share.setup
    num_bytes = segment.dense.held(setup.tp) + segment.shared.held(setup.tp)
    num_flops = 2 * tokens * (segment.dense.parameters + segment.shared.parameters) / setup.tp
    rate = setup.bytes_per_s * setup.spread_share
    seconds, bound = share.roofline(num_bytes, num_flops, setup.architecture.math, rate)
    used = ("memory_efficiency", "far_share", f"{setup.role}_rate_share", "overlap")
    return Term("dense weights", seconds, bound, num_bytes, num_flops, used)


def _launches(segment: Segment, share: Share, tokens: float) -> Term:
    kernels = share.setup.kernels
    shared = 2 if segment.shared.parameters and tokens > kernels.number("inline_rows") else 0
    count = segment.num_layers * (segment.products + shared)
    return Term("launches", count * kernels.number("launch_us") * 1e-6, "latency", coefficients=("launch_us", "inline_rows"))


def _attention(segment: Segment, share: Share, tokens: float) -> Term:
    setup, load = share.setup, share.load
    kernels, context = setup.kernels, load.mean_context
    seconds = bytes_read = operations = 0.0
    bounds: dict[Bound, float] = {"memory": 0.0, "products": 0.0, "latency": 0.0}
    part = tokens / load.tokens if load.tokens else 0.0
    for kind in segment.attention:
        if kind.selected:
            num_bytes = tokens * kind.gathered_bytes(context)
            blocks = ceil(kind.rows(context) / GATHER_ROWS)
            gathers = blocks * kernels.number("gather_us") / kernels.number("blocks_in_flight")
            floor = kernels.number("sparse_attention_us") + max(0.0, gathers - kernels.number("early_rows_us"))
        else:
            positions = (load.context_tokens + load.tokens) * part / kind.ratio
            num_bytes = positions * kind.row_bytes / min(setup.tp, kind.kv_heads)
            floor = kernels.number("dense_attention_us")
        num_flops = tokens * kind.rows(context) * kind.pair_flops / setup.tp
        worked, bound = share.roofline(num_bytes, num_flops, "bf16", setup.bytes_per_s * setup.spread_share)
        bounds[bound if worked > floor * 1e-6 else "latency"] += kind.num_layers
        seconds += kind.num_layers * max(floor * 1e-6, worked)
        bytes_read += kind.num_layers * num_bytes
        operations += kind.num_layers * num_flops
    used = ("sparse_attention_us", "gather_us", "blocks_in_flight", "early_rows_us", "dense_attention_us", "far_share")
    return Term("attention", seconds, max(bounds, key=lambda name: bounds[name]), bytes_read, operations, used)


def _experts(segment: Segment, share: Share) -> Term:
    setup, experts = share.setup, segment.experts
    assert experts is not None
    count = touched(experts.num, experts.top, experts.num / setup.ep, share.group_tokens)
    num_bytes = count * experts.num_bytes / setup.tp
    num_flops = 2 * share.group_tokens * experts.top * experts.parameters / setup.num_chips
    rate = min(setup.bytes_per_s * setup.domain_share("local_experts"), setup.staged_bytes_per_s)
    gain = setup.kernels.number("expert_rate_gain")
    seconds, bound = share.roofline(num_bytes, num_flops, experts.math, rate, gain)
    layers = segment.num_layers
    used = ("memory_efficiency", "local_experts", "weight_stages", "stage_bytes", "memory_latency_us", "expert_rate_gain")
    return Term("experts", layers * seconds, bound, layers * num_bytes, layers * num_flops, (*used, f"{setup.role}_rate_share"))


def _indexers(segment: Segment, share: Share, tokens: float) -> Term:
    setup, load = share.setup, share.load
    sequences = load.num_sequences * tokens / load.tokens if load.tokens else 0.0
    per_sequence = load.context_tokens / load.num_sequences if load.num_sequences else 0.0
    num_bytes = num_flops = 0.0
    for kind in segment.indexers:
        num_bytes += kind.num_layers * sequences * kind.keys(per_sequence) * kind.key_bytes
        num_flops += kind.num_layers * tokens * kind.keys(load.mean_context) * kind.pair_flops
    seconds, bound = share.roofline(num_bytes, num_flops, "fp8", setup.bytes_per_s * setup.spread_share)
    used = ("memory_efficiency", "far_share", f"{setup.role}_rate_share", "overlap")
    return Term("indexer", seconds, bound, num_bytes, num_flops, used)


def _streams(segment: Segment, share: Share, tokens: float) -> Term:
    setup = share.setup
    num_bytes = tokens * segment.stream_bytes
    moved = num_bytes / (setup.bytes_per_s * setup.domain_share("local_residuals"))
    floor = setup.kernels.number("boundary_us") * 1e-6
    seconds = segment.num_layers * max(floor, moved)
    used = ("boundary_us", "local_residuals", "far_share", "memory_efficiency")
    return Term(
        "residual streams", seconds, "memory" if moved > floor else "latency", segment.num_layers * num_bytes, 0.0, used
    )


def _exchanges(segment: Segment, share: Share, tokens: float) -> list[Term]:
    """Of experts between ranks, of sums between the chips of a rank (two a layer)."""
    setup, terms = share.setup, []
    kernels, hidden, layers = setup.kernels, setup.architecture.hidden_size, segment.num_layers
    if setup.ep > 1 and segment.experts:
        per_token = segment.experts.top * hidden * (ACTIVATION_BYTES["dispatch"] + ACTIVATION_BYTES["combine"])
        latency = kernels.number("alltoall_us") * 1e-6
        # A rank with little to send still receives what its experts are sent, the mean over the group.
        num_bytes = max(tokens, share.group_tokens / setup.ep) * per_token
        seconds = layers * alltoall_s(setup.chip, setup.ep, num_bytes, latency)
        bound: Bound = "link" if seconds > 2 * layers * latency else "latency"
        terms.append(Term("all-to-all", seconds, bound, layers * num_bytes, 0.0, ("alltoall_us",)))
    if setup.tp > 1:
        crossing = kernels.number("cross_tray_us") if setup.tp > setup.chips_per_tray else 0.0
        latency = (kernels.number("allreduce_us") + crossing) * 1e-6
        num_bytes = tokens * hidden * ACTIVATION_BYTES["reduce"]
        seconds = 2 * layers * allreduce_s(setup.chip, setup.tp, num_bytes, latency)
        bound = "link" if seconds > 4 * layers * latency else "latency"
        terms.append(Term("all-reduce", seconds, bound, 2 * layers * num_bytes, 0.0, ("allreduce_us", "cross_tray_us")))
    return terms
