"""A model as the cost model sees it: what each layer reads and multiplies, whatever the model's family."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from rackserve.sim.hardware import Math, read_data


class Weights(msgspec.Struct, frozen=True):
    """Matrices that every token passes. `cut_bytes` are cut over the devices of a rank, `whole_bytes` each of them holds."""

    parameters: float
    cut_bytes: float
    whole_bytes: float = 0.0

    def held(self, tp: int) -> float:
        """Bytes on one of `tp` devices."""
        return self.cut_bytes / tp + self.whole_bytes


class Experts(msgspec.Struct, frozen=True):
    """Routed experts of one layer: `num` of them, `top` per token, each of `parameters` in `num_bytes`."""

    num: int
    top: int
    parameters: float
    num_bytes: float
    math: Math


class Attention(msgspec.Struct, frozen=True):
    """Attention of `num_layers` alike layers over cached rows.

    pair_flops   operations per (query, row), all heads
    row_bytes    a row as it is read; one row stands for `ratio` positions
    limit        most rows a query reads, chosen by an indexer; 0: all of them
    window       positions besides, of which rows of `window_row_bytes` are read
    kv_heads     devices of a rank beyond these read the same rows
    """

    num_layers: int
    pair_flops: float
    row_bytes: float
    kv_heads: int
    ratio: int = 1
    limit: int = 0
    window: int = 0
    window_row_bytes: float = 0.0

    @property
    def selected(self) -> bool:
        """Whether each query gathers rows of its own."""
        return self.limit > 0 or self.window > 0

    def rows(self, context: float) -> float:
        """Rows that a query with `context` positions before it reads, the window's included."""
        rows = context / self.ratio if self.row_bytes else 0.0
        return (min(rows, self.limit) if self.limit else rows) + min(context, self.window)

    def gathered_bytes(self, context: float) -> float:
        """Bytes that one query gathers."""
        window = min(context, self.window)
        return (self.rows(context) - window) * self.row_bytes + window * self.window_row_bytes


class Indexer(msgspec.Struct, frozen=True):
    """What chooses rows in `num_layers` layers: scores of keys, at most `limit` of them (0: all), one per `ratio` positions."""

    num_layers: int
    pair_flops: float
    key_bytes: float
    ratio: int
    limit: int = 0

    def keys(self, context: float) -> float:
        """Keys that a query with `context` positions before it is scored against."""
        return min(context / self.ratio, self.limit) if self.limit else context / self.ratio


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive layers. `dense` and `shared` hold all their layers together, `experts` one layer's.

    tail_only     a prompt's early positions skip these layers
    products      separate products of a layer, those of the shared expert aside
    stream_bytes  what mixing residual streams reads and writes per token and layer
    """

    name: str
    num_layers: int
    dense: Weights
    attention: tuple[Attention, ...]
    products: int
    shared: Weights = Weights(0.0, 0.0)
    experts: Experts | None = None
    indexers: tuple[Indexer, ...] = ()
    tail_only: bool = False
    stream_bytes: float = 0.0


class Draft(msgspec.Struct, frozen=True):
    """A speculative head: one pass over `block` positions per sequence and step, each with a product with the output matrix."""

    segment: Segment
    block: int


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One model.

    math            format of dense products; the output matrix, attention and indexers multiply in bf16, bf16 and fp8
    head            output matrix
    embedding       rows looked up by token
    kv_bytes        cached per token; `state_bytes` per sequence besides
    table_bytes     tables of which `table_row_bytes` are read per token, wherever they lie
    """

    name: str
    source: str
    math: Math
    hidden_size: int
    segments: tuple[Segment, ...]
    head: Weights
    embedding: Weights
    kv_bytes: float
    state_bytes: float = 0.0
    table_bytes: float = 0.0
    table_row_bytes: float = 0.0
    draft: Draft | None = None

    @property
    def num_bytes(self) -> float:
        """All weights, tables aside."""
        segments = [*self.segments, *([self.draft.segment] if self.draft else [])]
        return (
            sum(part.held(1) for part in (self.head, self.embedding))
            + sum(segment.dense.held(1) + segment.shared.held(1) for segment in segments)
            + sum(each.num_layers * each.experts.num * each.experts.num_bytes for each in segments if each.experts)
        )


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plain transformer by the sizes of its `config.json`, of which `architectures.toml` holds some.

    num_experts 0: dense. kv_lora_rank > 0: latent attention, one row of kv_lora_rank + rope_dim values per position.
    dense_layers: layers in front that have a dense feed-forward of `ffn_size` where others have experts.
    """

    source: str
    math: Math
    bytes_per_value: float
    kv_bytes_per_value: float
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    head_dim: int
    ffn_size: int
    kv_heads: int = 1
    num_experts: int = 0
    top: int = 0
    expert_size: int = 0
    num_shared: int = 0
    dense_layers: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0


@cache
def plain_architectures() -> Mapping[str, Architecture]:
    """The models of `architectures.toml` by name."""
    content = msgspec.toml.decode(read_data("architectures.toml"), type=dict[str, Sizes])
    return {name: plain_architecture(name, sizes) for name, sizes in content.items()}


def plain_architecture(name: str, sizes: Sizes) -> Architecture:
    """The architecture that `sizes` describe."""
    hidden, scale = sizes.hidden_size, sizes.bytes_per_value
    feed_forward = 3 * hidden * sizes.ffn_size
    num_moe = sizes.num_layers - sizes.dense_layers if sizes.num_experts else 0
    num_dense = sizes.num_layers - num_moe
    segments = []
    if num_dense:
        segments.append(_segment("dense layers", sizes, num_dense, num_dense * feed_forward))
    if num_moe:
        expert = 3 * hidden * sizes.expert_size
        shared = num_moe * sizes.num_shared * expert
        experts = Experts(sizes.num_experts, sizes.top, expert, expert * scale, sizes.math)
        segment = _segment("expert layers", sizes, num_moe, num_moe * sizes.num_experts * hidden)
        segments.append(msgspec.structs.replace(segment, experts=experts, shared=Weights(shared, shared * scale)))
    vocabulary = Weights(sizes.vocab_size * hidden, 2 * sizes.vocab_size * hidden)
    attention = segments[0].attention[0]
    return Architecture(
        name=name,
        source=sizes.source,
        math=sizes.math,
        hidden_size=hidden,
        segments=tuple(segments),
        head=vocabulary,
        embedding=vocabulary,
        kv_bytes=sizes.num_layers * attention.row_bytes,
    )


def _segment(name: str, sizes: Sizes, num_layers: int, other: float) -> Segment:
    """`num_layers` layers of attention and, over all of them, `other` parameters more."""
    hidden, heads = sizes.hidden_size, sizes.num_heads
    if sizes.kv_lora_rank:
        latent, rope, value = sizes.kv_lora_rank, sizes.rope_dim, sizes.value_dim
        queries = sizes.q_lora_rank * (hidden + heads * (sizes.head_dim + rope))
        parameters = queries + hidden * (latent + rope) + latent * heads * (sizes.head_dim + value) + heads * value * hidden
        row, pair, products = latent + rope, 2 * heads * (2 * latent + rope), 7
    else:
        parameters = hidden * sizes.head_dim * (2 * heads + 2 * sizes.kv_heads)
        row, pair, products = 2 * sizes.kv_heads * sizes.head_dim, 4 * heads * sizes.head_dim, 4
    attention = Attention(num_layers, pair, row * sizes.kv_bytes_per_value, sizes.kv_heads)
    total = num_layers * parameters + other
    return Segment(
        name=name,
        num_layers=num_layers,
        dense=Weights(total, total * sizes.bytes_per_value),
        attention=(attention,),
        products=products,
    )
