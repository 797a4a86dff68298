from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rackserve.model.deepseek_v41.attention import Attention, attend
from rackserve.model.deepseek_v41.linear import choose_products
from rackserve.model.deepseek_v41.rotation import Rotation, frequencies
from rackserve.model.deepseek_v41.rounding import pack_fp8, unpack_fp8
from rackserve.model.deepseek_v41.streams import rms_norm
from rackserve.model.parallel import Alone
from rackserve.model.products import Products
from tests.model.deepseek_v41.golden import CONFIG, linear, noise, weights

H, DIM, D = CONFIG.num_attention_heads, CONFIG.head_dim, CONFIG.hidden_size
NAME = "layers.2.attn"
POSITIONS = torch.tensor([0, 5, 6, 40])


def naive(queries: Tensor, rows: Tensor, there: Tensor, sink: Tensor) -> Tensor:
    """One query, head and row at a time."""
    out = torch.zeros(queries.shape, dtype=torch.float64)
    for n in range(len(queries)):
        for head in range(queries.shape[1]):
            kept = [row.double() for row, exists in zip(rows[n], there[n], strict=True) if exists]
            logits = [float(queries[n, head].double() @ row) / math.sqrt(queries.shape[2]) for row in kept]
            top = max([*logits, float(sink[head])])
            whole = sum(math.exp(logit - top) for logit in logits) + math.exp(float(sink[head]) - top)
            for logit, row in zip(logits, kept, strict=True):
                out[n, head] += math.exp(logit - top) / whole * row
    return out


def case(count: int, num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    there = noise(count, num_rows, seed=seed + 2) > -0.5
    rows = noise(count, num_rows, DIM, seed=seed + 1, scale=2.0).masked_fill(~there[..., None], 0.0)
    return noise(count, H, DIM, seed=seed, scale=2.0), rows, there, noise(H, seed=seed + 3, scale=3.0)


@pytest.mark.parametrize(("count", "num_rows"), [(1, 1), (3, 24), (2, 16)])
def test_it_is_a_softmax_over_the_rows_there_are_and_a_sink_of_no_value(count: int, num_rows: int) -> None:
    queries, rows, there, sink = case(count, num_rows)
    got = attend(Products("direct"), queries, rows, there, sink)
    assert torch.allclose(got.double(), naive(queries, rows, there, sink), atol=1e-5)


def test_a_query_without_rows_gets_nothing() -> None:
    queries, rows, there, sink = case(2, 8)
    there[1] = False
    got = attend(Products("direct"), queries, rows.masked_fill(~there[..., None], 0.0), there, sink)
    assert torch.equal(got[1], torch.zeros(H, DIM)) and bool(got[0].any())


def test_a_sink_only_makes_the_shares_smaller() -> None:
    queries, rows, there, _ = case(2, 8)
    there[0] = True
    small = attend(Products("direct"), queries, rows, there, torch.full((H,), -1e4))
    large = attend(Products("direct"), queries, rows, there, torch.full((H,), 1e4))
    assert torch.equal(large, torch.zeros_like(large))
    shares = torch.einsum("nhd,nrd->nhr", queries, rows) / math.sqrt(DIM)
    want = torch.einsum("nhr,nrd->nhd", shares.masked_fill(~there[:, None], -torch.inf).softmax(-1), rows)
    assert torch.allclose(small, want, atol=1e-5)


def test_a_query_has_the_same_bits_alone_and_among_others() -> None:
    products = choose_products(CONFIG, weights())
    queries, rows, there, sink = case(32, CONFIG.sliding_window + CONFIG.index_topk)
    whole = attend(products, queries, rows, there, sink)
    for begin, end in ((0, 1), (3, 5), (10, 31)):
        part = slice(begin, end)
        assert torch.equal(attend(products, queries[part], rows[part], there[part], sink), whole[part])


def test_projections_follow_the_formulas() -> None:
    attention = Attention(CONFIG, weights(), NAME, linear(), Alone())
    rotation, x = Rotation(frequencies(CONFIG, compressed=True), POSITIONS), noise(4, D)
    right = {name: weights().matrix(f"{NAME}.{name}").right() for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")}
    latent = attention.latent(x)
    assert torch.allclose(latent, rms_norm(x @ right["wq_a"], weights().vector(f"{NAME}.q_norm"), 1e-20), atol=1e-5)
    queries = attention.query(latent, rotation)
    assert torch.allclose(queries, rotation.apply((latent @ right["wq_b"]).view(4, H, DIM)), atol=1e-4)
    row = rotation.apply(rms_norm(x @ right["wkv"], weights().vector(f"{NAME}.kv_norm"), 1e-20))
    got = unpack_fp8(attention.rows(x, rotation), DIM)
    assert torch.allclose(got, unpack_fp8(pack_fp8(row), DIM), atol=1e-4)


def test_output_is_turned_back_and_goes_through_its_group() -> None:
    attention = Attention(CONFIG, weights(), NAME, linear(), Alone())
    rotation, attended = Rotation(frequencies(CONFIG, compressed=True), POSITIONS), noise(4, H, DIM)
    grouped = rotation.apply(attended, inverse=True).reshape(4, CONFIG.o_groups, -1)
    wo_a = weights().matrix(f"{NAME}.wo_a").right().t().view(CONFIG.o_groups, CONFIG.o_lora_rank, -1)
    wo_b = weights().matrix(f"{NAME}.wo_b").right()
    want = torch.einsum("tgi,gri->tgr", grouped, wo_a).flatten(1) @ wo_b
    assert torch.allclose(attention.output(attended, rotation), want, atol=1e-3)


def test_no_rows_are_no_mistake() -> None:
    attention = Attention(CONFIG, weights(), NAME, linear(), Alone())
    rotation = Rotation(frequencies(CONFIG, compressed=False), POSITIONS[:0])
    queries = attention.query(attention.latent(noise(0, D)), rotation)
    assert attention.rows(noise(0, D), rotation).shape == (0, DIM + DIM // 32)
    assert attention.output(queries, rotation).shape == (0, D)
