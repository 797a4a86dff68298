"""What is checked and timed on a GPU: every kernel at the model's sizes, with the reference's answer for some of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rackserve.kernels.triton import attention, experts, indexer, reduction, rows, selection, streams
from rackserve.model.deepseek_v41 import rounding
from rackserve.model.deepseek_v41.attention import attend
from rackserve.model.deepseek_v41.indexer import best
from rackserve.model.deepseek_v41.streams import rms_norm
from rackserve.model.products import Products

SEEN = 4
"""Rows of a result that are compared: the first ones."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of what it works on.

    decoded: queries of a step; prompt: rows of a chunk; context: positions of each sequence;
    different: rows that caches are filled with, over and over.
    """

    hidden: int = 5120
    streams: int = 4
    heads: int = 64
    dim: int = 512
    window: int = 128
    topk: int = 512
    index_heads: int = 32
    index_dim: int = 128
    experts: int = 48
    top: int = 6
    inner: int = 2304
    decoded: int = 64
    prompt: int = 2048
    context: int = 131_072
    block_rows: int = 128
    candidates: int = 2048
    candidate_size: int = 8
    different: int = 512


RELEASED = Sizes()
"""48 of 384 experts: one of eight devices."""

FEW = Sizes(experts=2, decoded=2, prompt=2, context=2048)
"""The same widths over few rows: enough to compile."""

TINY = Sizes(
    hidden=128, heads=4, dim=64, window=16, topk=40, index_heads=4, index_dim=32, experts=3, top=2, inner=64, decoded=2,
    prompt=3, context=240, block_rows=8, candidates=6, candidate_size=4, different=5,
)  # fmt: skip
"""Small enough for the interpreter."""


@dataclass(frozen=True)
class Case:
    """A call to time, the bytes it must move at least, and its error: the largest one, as a part of what is allowed."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    error: Callable[[], float]


def cases(sizes: Sizes, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Callable[[], Case]]:
    """How to make every case; one at a time, since some hold gigabytes."""
    draw = Draw(device, dtype, sizes.different)
    both = (sizes.decoded, sizes.prompt)
    return [
        lambda: insertion(sizes, draw),
        lambda: attending(sizes, draw, attention.decode, sizes.decoded),
        lambda: attending(sizes, draw, attention.prefill, sizes.prompt),
        lambda: scoring(sizes, draw),
        lambda: selecting(sizes, draw),
        lambda: choosing_blocks(sizes, draw),
        lambda: scoring_candidates(sizes, draw),
        *(lambda count=count: advancing(sizes, draw, count) for count in both),
        *(lambda count=count: mixing_experts(sizes, draw, count) for count in both),
        lambda: reducing(sizes, draw),
    ]  # fmt: skip


class Draw:
    """Random tensors on a device, the same each time."""

    def __init__(self, device: str, dtype: torch.dtype, different: int) -> None:
        self.device, self.dtype, self._different = device, dtype, different
        self._generator = torch.Generator(device).manual_seed(0)

    def noise(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self._generator, device=self.device)
        return values.to(dtype or self.dtype)

    def floats(self, *shape: int) -> Tensor:
        return self.noise(*shape, dtype=torch.float32)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype)

    def arena(self, kind: rows.RowKind, blocks: int, block_rows: int, channels: int) -> Tensor:
        """A cache of random rows; some different ones, repeated."""
        count = self._different
        some = torch.empty(1, count, rows.row_bytes(kind, channels), dtype=torch.uint8, device=self.device)
        rows.insert(self.noise(count, channels), kind, some, torch.arange(count, device=self.device))
        picked = self.integers(0, count, blocks, block_rows, dtype=torch.int64)
        return some[0][picked].contiguous()


def largest(found: Tensor, wanted: Tensor, allowed: float) -> float:
    """The largest error over what is allowed: a part of each value, and the same part of the mean one."""
    wanted = wanted.to(found.device, torch.float64)
    bound = allowed * (wanted.abs() + wanted.abs().mean())
    return float(((found.double() - wanted).abs() / bound).max())


def insertion(sizes: Sizes, draw: Draw) -> Case:
    """Window rows of a chunk."""
    x, weight = draw.noise(sizes.prompt, sizes.dim), draw.floats(sizes.dim)
    cache = torch.zeros(1, sizes.prompt, rows.row_bytes("window", sizes.dim), dtype=torch.uint8, device=draw.device)
    places = torch.arange(sizes.prompt, device=draw.device)

    def run() -> None:
        rows.insert(x, "window", cache, places, weight=weight, eps=1e-20)

    def error() -> float:
        """A row may differ in one code of a hundred by one step of an eighth, not more."""
        run()
        wanted = rounding.pack_fp8(rms_norm(x[:SEEN].float().cpu(), weight.cpu(), 1e-20))
        found = cache[0, :SEEN].cpu()
        values = largest(rounding.unpack_fp8(found, sizes.dim), rounding.unpack_fp8(wanted, sizes.dim), 0.13)
        return max(values, 100 * float((found != wanted).float().mean()))

    return Case(f"insert, {sizes.prompt} window rows", run, x.nbytes + cache.nbytes, error)


def attending(sizes: Sizes, draw: Draw, way: Callable[..., Tensor], count: int) -> Case:
    """Queries of as many sequences, each with a full window and a full selection."""
    per_sequence = -(-sizes.context // 2 // sizes.block_rows)
    shared = max(1, min(count, 16))
    main = draw.arena("main", shared * per_sequence, sizes.block_rows, sizes.dim)
    tables = draw.integers(0, len(main), shared, per_sequence)
    sequences = (torch.arange(count, device=draw.device) % shared).int()
    selected = torch.stack([torch.randperm(sizes.context // 2, device=draw.device)[: sizes.topk] for _ in range(shared)])
    chosen = attention.Chosen(main, tables, sequences, selected[sequences.long()].sort(1).values.int().contiguous())
    rings = draw.arena("window", count, sizes.window, sizes.dim)
    place = torch.arange(count, device=draw.device).int()
    positions = torch.full_like(place, sizes.context - 1)
    window = attention.Window(rings, place, positions, torch.zeros_like(place), sizes.window)
    queries, sink = draw.noise(count, sizes.heads, sizes.dim), draw.floats(sizes.heads)

    def error() -> float:
        """In float64; number formats of the queries (shares and results are rounded to them) bound what is allowed."""
        found = way(queries, window, chosen, sink)[:SEEN]
        at = torch.arange(sizes.context - sizes.window, sizes.context) % sizes.window
        near = rounding.unpack_fp8(rings[:SEEN].cpu()[:, at], sizes.dim)
        row = chosen.selected[:SEEN].long()
        table = tables[sequences[:SEEN].long()].long()
        packed = main[table.gather(1, row // sizes.block_rows), row % sizes.block_rows].cpu()
        both = torch.cat((near, rounding.unpack_fp4_fine(packed, sizes.dim)), 1).double()
        there = torch.ones(both.shape[:2], dtype=torch.bool)
        wanted = attend(Products("single"), queries[:SEEN].double().cpu(), both, there, sink.double().cpu())
        return largest(found, wanted, 1e-4 if draw.dtype == torch.float32 else 0.03)

    row_bytes = sizes.window * rings.shape[-1] + sizes.topk * main.shape[-1]
    moved = count * row_bytes + 2 * queries.nbytes
    return Case(f"{way.__name__} attention, {count} queries", lambda: way(queries, window, chosen, sink), moved, error)


def _keys(sizes: Sizes, draw: Draw) -> tuple[Tensor, Tensor, indexer.Keys, int]:
    width = sizes.context // 2
    blocks = -(-width // sizes.block_rows)
    cache = draw.arena("index", 4 * blocks, sizes.block_rows, sizes.index_dim)
    count = sizes.decoded
    tables = draw.integers(0, len(cache), count, blocks)
    place = torch.arange(count, device=draw.device).int()
    keys = indexer.Keys(cache, tables, place, torch.full_like(place, width))
    queries = rounding.round_fp4(draw.floats(count, sizes.index_heads, sizes.index_dim).cpu()).to(draw.device, draw.dtype)
    return queries, draw.floats(count, sizes.index_heads), keys, width


def _wanted_scores(queries: Tensor, weights: Tensor, keys: indexer.Keys, sizes: Sizes, row: Tensor) -> Tensor:
    """Float64 scores of rows [SEEN, n] for the first queries."""
    block = keys.tables[:SEEN].long().cpu().gather(1, row // sizes.block_rows)
    packed = keys.cache.cpu()[block, row % sizes.block_rows]
    unpacked = rounding.unpack_fp4(packed, sizes.index_dim).double()
    dots = (queries[:SEEN].double().cpu() @ unpacked.transpose(1, 2)).relu()
    return (weights[:SEEN].double().cpu()[..., None] * dots).sum(1)


def scoring(sizes: Sizes, draw: Draw) -> Case:
    """All rows of a context compressed by two."""
    queries, weights, keys, width = _keys(sizes, draw)

    def run() -> Tensor:
        return indexer.scores(queries, weights, keys, width)

    def error() -> float:
        part = min(width, 2048)
        row = torch.arange(part).expand(min(SEEN, sizes.decoded), -1)
        return largest(run()[:SEEN, :part], _wanted_scores(queries, weights, keys, sizes, row), 1e-4)

    moved = sizes.decoded * width * (keys.cache.shape[-1] + 4)
    return Case(f"index scores, {sizes.decoded} queries x {width} keys", run, moved, error)


def selecting(sizes: Sizes, draw: Draw) -> Case:
    """The best of those scores, half of which are equal."""
    scores = draw.floats(sizes.decoded, sizes.context // 2).relu()

    def run() -> Tensor:
        return selection.select(scores, sizes.topk)

    def error() -> float:
        wrong = run()[:SEEN].long().cpu() != best(scores[:SEEN].cpu(), sizes.topk)
        return 2.0 * float(wrong.any())

    return Case(f"selection, {sizes.topk} of {scores.shape[1]}", run, scores.nbytes, error)


def choosing_blocks(sizes: Sizes, draw: Draw) -> Case:
    """Candidates: the best blocks of those scores, the newest among them."""
    scores = draw.floats(sizes.decoded, sizes.context // 2).relu()
    visible = torch.full((sizes.decoded,), scores.shape[1] - 1, dtype=torch.int32, device=draw.device)
    scores[:, -1] = -torch.inf

    def run() -> Tensor:
        return selection.select(indexer.block_scores(scores, visible, sizes.candidate_size), sizes.candidates)

    def error() -> float:
        padded = torch.nn.functional.pad(scores[:SEEN].cpu(), (0, -scores.shape[1] % sizes.candidate_size), value=-torch.inf)
        blocks = padded.unflatten(1, (-1, sizes.candidate_size)).amax(-1)
        blocks[:, (scores.shape[1] - 2) // sizes.candidate_size] = torch.inf
        return 2.0 * float((run()[:SEEN].long().cpu() != best(blocks, sizes.candidates)).any())

    return Case(f"candidate blocks, {sizes.candidates} of {scores.shape[1]} rows", run, scores.nbytes, error)


def scoring_candidates(sizes: Sizes, draw: Draw) -> Case:
    """Rows of candidate blocks alone, and the best of them."""
    queries, weights, keys, width = _keys(sizes, draw)
    most = width // sizes.candidate_size
    blocks = torch.stack([torch.randperm(most, device=draw.device)[: sizes.candidates] for _ in range(sizes.decoded)])
    blocks = blocks.sort(1).values.int().contiguous()

    def run() -> Tensor:
        scores = indexer.candidate_scores(queries, weights, keys, blocks, sizes.candidate_size)
        return selection.select(scores, sizes.topk, blocks, sizes.candidate_size)

    def error() -> float:
        scores = indexer.candidate_scores(queries, weights, keys, blocks, sizes.candidate_size)[:SEEN]
        size = sizes.candidate_size
        row = (blocks[:SEEN].long().cpu()[..., None] * size + torch.arange(size)).flatten(1)
        chosen = best(scores.cpu(), sizes.topk)
        numbers = torch.where(chosen >= 0, row.gather(1, chosen.clamp(min=0)), -1)
        wrong = (run()[:SEEN].long().cpu() != numbers).any()
        return max(2.0 * float(wrong), largest(scores, _wanted_scores(queries, weights, keys, sizes, row), 1e-4))

    moved = sizes.decoded * blocks.shape[1] * sizes.candidate_size * (keys.cache.shape[-1] + 8)
    return Case(f"candidates, {sizes.decoded} queries x {blocks.shape[1]} blocks", run, moved, error)


def advancing(sizes: Sizes, draw: Draw, count: int) -> Case:
    """A sublayer's result into the streams, and the next one's input and mix out of them."""
    n, d = sizes.streams, sizes.hidden
    h, y = draw.noise(count, n, d), draw.noise(count, d)
    mix = streams.Mix(
        draw.floats(count, n).sigmoid(), draw.floats(count, n).sigmoid() * 2, draw.floats(count, n, n).softmax(-1)
    )
    kinds = 2 * n + n * n
    mixing = streams.Mixing(draw.floats(kinds, n * d) / (n * d) ** 0.5, draw.floats(3), draw.floats(kinds), 20, 1e-6, 1e-20)
    pre, weight = draw.floats(count, n).sigmoid(), draw.floats(d)

    def error() -> float:
        """New streams to a rounding; input and mix from them in float64, without the last iterations' help."""
        done = streams.advance(h, y, mix, pre, weight, 1e-20, mixing)
        part = slice(0, SEEN)
        wide, result = h[part].double(), y[part].double()
        wanted = mix.post[part, :, None] * result[:, None] + torch.einsum("tij,tid->tjd", mix.comb[part].double(), wide)
        collapsed = (pre[part, :, None] * done.streams[part].double()).sum(1)
        x = rms_norm(collapsed, weight.double(), 1e-20)
        flat = done.streams[part].double().flatten(1)
        m = flat @ mixing.fn.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
        first = torch.sigmoid(m[:, :n] * mixing.scale[0] + mixing.base[:n]) + 1e-6
        assert done.mix is not None
        loose = 1e-4 if draw.dtype == torch.float32 else 0.01
        return max(
            largest(done.streams[part], wanted, loose),
            largest(done.x[part], x, loose),
            largest(done.mix.pre[part], first, 1e-4),
        )

    moved = 2 * h.nbytes + 2 * y.nbytes + mixing.fn.nbytes
    return Case(
        f"streams, {count} rows", lambda: streams.advance(h, y, mix, pre, weight, 1e-20, mixing), moved, error
    )  # fmt: skip


def mixing_experts(sizes: Sizes, draw: Draw, count: int) -> Case:
    """Routed experts of one device."""
    hidden, inner, number = sizes.hidden, sizes.inner, sizes.experts
    top = min(sizes.top, number)

    def matrix(outputs: int, inputs: int) -> experts.Fp4:
        pairs = draw.integers(0, 256, number, outputs, inputs // 2, dtype=torch.uint8)
        return experts.Fp4(pairs, draw.integers(112, 120, number, outputs, inputs // 32, dtype=torch.uint8))

    w1, w2, w3 = matrix(inner, hidden), matrix(hidden, inner), matrix(inner, hidden)
    x = rows.pack_fp8(draw.noise(count, hidden))
    chosen = torch.stack([torch.randperm(number, device=draw.device)[:top] for _ in range(count)])
    weights = draw.floats(count, top).sigmoid()

    def run() -> Tensor:
        return experts.mixture(x, chosen, weights, w1, w2, w3, 10.0)

    def wide(matrix: experts.Fp4, expert: int) -> Tensor:
        packed = torch.cat((matrix.pairs[expert], matrix.exponents[expert]), -1).cpu()
        return rounding.unpack_fp4(packed, 2 * matrix.pairs.shape[-1]).double()

    def error() -> float:
        found, seen = run(), rounding.unpack_fp8(x[:SEEN].cpu(), hidden).double()
        wanted = torch.zeros(len(seen), hidden, dtype=torch.float64)
        for row, values in enumerate(seen):
            for place, expert in enumerate(chosen[row].tolist()):
                gate = (values @ wide(w1, expert).T).clamp(max=10.0)
                up = (values @ wide(w3, expert).T).clamp(-10.0, 10.0)
                between = gate * gate.sigmoid() * up * weights[row, place].double().cpu()
                wanted[row] += rounding.round_fp8(between.float()[None])[0].double() @ wide(w2, expert).T
        return largest(found[:SEEN], wanted, 0.02)

    touched = min(number, count * top)
    moved = touched * 3 * hidden * inner * 17 // 32 + x.nbytes + count * hidden * 4
    return Case(f"experts, {count} rows, {number} experts", run, moved, error)


def reducing(sizes: Sizes, draw: Draw) -> Case:
    """Four parts in this device's own memory: what the kernel costs without a link."""
    parts = [draw.noise(sizes.decoded, sizes.hidden) for _ in range(4)]
    residual, weight = draw.noise(sizes.decoded, sizes.hidden), draw.floats(sizes.hidden)

    def run() -> tuple[Tensor, Tensor]:
        return reduction.reduce_norm(parts[0], reduction.GatheredParts(lambda part: parts), residual, weight, 1e-20)

    def error() -> float:
        total, normed = (part[:SEEN] for part in run())
        wanted = sum((part[:SEEN].double() for part in parts), residual[:SEEN].double())
        loose = 1e-5 if draw.dtype == torch.float32 else 0.01
        return max(largest(total, wanted, loose), largest(normed, rms_norm(total.double(), weight.double(), 1e-20), loose))

    return Case(f"sum of 4 parts and norm, {sizes.decoded} rows", run, 7 * residual.nbytes, error)
