"""Models of published measurements that nothing else here needs, from their config.json as remembered, not looked up."""

from __future__ import annotations

from functools import cache

import msgspec

from rackserve.base.topology import Role
from rackserve.sim.cost.architecture import Architecture, Attention, Experts, Segment, Sizes, Weights, plain_architecture

MXFP4_BYTES = 0.53
"""Of a value in MXFP4 with its scales: 4 bits and 8 for every 32."""

NVFP4_BYTES = 0.5625
"""Of a value in NVFP4: 4 bits and 8 for every 16."""

KIMI_SIZES = Sizes(
    source="config.json of moonshotai/Kimi-K2, from memory; NVFP4 experts, bf16 attention, fp8 latents",
    math="bf16",
    bytes_per_value=2.0,
    kv_bytes_per_value=1.0,
    num_layers=61,
    hidden_size=7168,
    vocab_size=163_840,
    num_heads=64,
    head_dim=128,
    ffn_size=18_432,
    num_experts=384,
    top=8,
    expert_size=2_048,
    num_shared=1,
    dense_layers=1,
    q_lora_rank=1_536,
    kv_lora_rank=512,
    rope_dim=64,
    value_dim=128,
)


@cache
def kimi(role: Role) -> Architecture:
    """Kimi-K2.5's language model in NVFP4. For prompts its latents are expanded to keys and values before they are attended."""
    plain = plain_architecture("kimi-k2.5-nvfp4", KIMI_SIZES)
    expanded = 2 * KIMI_SIZES.num_heads * (KIMI_SIZES.head_dim + KIMI_SIZES.rope_dim + KIMI_SIZES.value_dim)
    segments = []
    for segment in plain.segments:
        experts = segment.experts
        if experts is not None:
            experts = msgspec.structs.replace(experts, num_bytes=experts.parameters * NVFP4_BYTES, math="fp4")
        attention = segment.attention
        if role == "prefill":
            attention = tuple(msgspec.structs.replace(kind, pair_flops=expanded) for kind in attention)
        segments.append(msgspec.structs.replace(segment, experts=experts, attention=attention))
    return msgspec.structs.replace(plain, segments=tuple(segments))


@cache
def gpt_oss() -> Architecture:
    """gpt-oss-120b: MXFP4 experts multiplied in bf16, every other layer reads a window of 128 positions."""
    layers, hidden, heads, kv_heads, head_dim, vocabulary = 36, 2_880, 64, 8, 64, 201_088
    expert = 3 * hidden * hidden
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    dense = layers * (attention + hidden * 128)
    row, pair = 2 * kv_heads * head_dim * 2, 4 * heads * head_dim
    segment = Segment(
        name="expert layers",
        num_layers=layers,
        dense=Weights(dense, 2 * dense),
        attention=(
            Attention(layers // 2, pair, row, kv_heads),
            Attention(layers // 2, pair, 0, kv_heads, window=128, window_row_bytes=row),
        ),
        products=4,
        experts=Experts(128, 4, expert, expert * MXFP4_BYTES, "bf16"),
    )
    table = Weights(vocabulary * hidden, 2 * vocabulary * hidden)
    return Architecture(
        name="gpt-oss-120b",
        source="config.json of openai/gpt-oss-120b, from memory; all layers' rows are stored",
        math="bf16",
        hidden_size=hidden,
        segments=(segment,),
        head=table,
        embedding=table,
        kv_bytes=layers * row,
    )
