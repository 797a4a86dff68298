"""Attention as other implementations lay it out. The numbers are the same, the order in which they are added up is not."""

from __future__ import annotations

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.backbone import Backbone
from rackserve.model.deepseek_v41.rounding import unpack_fp4_fine, unpack_fp8
from rackserve.model.deepseek_v41.spans import Span
from rackserve.model.products import Products
from tests.model.deepseek_v41.golden import CONFIG


def sink_last(products: Products, queries: Tensor, rows: Tensor, there: Tensor, sink: Tensor) -> Tensor:
    """In place of `attend`: the sink behind the rows, not before them."""
    count, heads, dim = queries.shape
    scores = queries.new_empty(count, heads, rows.shape[1])
    products.bmm(queries.contiguous(), rows.transpose(1, 2).contiguous(), scores, 1)
    scores = (scores * dim**-0.5).masked_fill(~there[:, None], -torch.inf)
    shares = torch.cat((scores, sink[:, None].expand(count, -1, 1)), -1).softmax(-1)[..., :-1]
    out = torch.empty_like(queries)
    products.bmm(shares.contiguous(), rows, out, 1)
    return out


def attend_span_densely(
    self: Backbone, layer: int, span: Span, queries: Tensor, packed: Tensor, out: Tensor, sink: Tensor
) -> None:
    """In place of `Backbone._attend_span`, for whole sequences: a masked row of all tokens, all compressed rows, the sink."""
    count, source = span.count, CONFIG.kv_source(layer)
    keys = unpack_fp8(packed[span.rows], CONFIG.head_dim)
    distance = torch.arange(count)[:, None] - torch.arange(count)
    seen = (distance >= 0) & (distance < CONFIG.sliding_window)
    if source >= 0:
        assert span.selected is not None
        num_rows = count // CONFIG.compress_ratios[layer]
        compressed = self._arena.read("main", source, span.blocks, torch.arange(num_rows))
        keys = torch.cat((keys, unpack_fp4_fine(compressed, CONFIG.head_dim)))
        chosen = torch.zeros(count, num_rows + 1, dtype=torch.bool)
        chosen.scatter_(1, span.selected.where(span.selected >= 0, num_rows), True)
        seen = torch.cat((seen, chosen[:, :-1]), 1)
    keys = torch.cat((keys, keys.new_zeros(1, CONFIG.head_dim)))
    logits = torch.einsum("shd,td->hst", queries, keys) * CONFIG.head_dim**-0.5
    bias = torch.zeros(count, len(keys)).masked_fill(~torch.nn.functional.pad(seen, (0, 1), value=True), -torch.inf)
    bias = bias.repeat(len(sink), 1, 1)
    bias[:, :, -1] = sink[:, None]
    out[span.rows] = torch.einsum("hst,td->shd", (logits + bias).softmax(-1), keys)
