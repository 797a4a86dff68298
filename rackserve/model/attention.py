"""Attention over KV that lies in blocks, with results that do not depend on what else is computed beside a query.

Keys are cut into partitions of a fixed number of positions. Every matrix product has a fixed inner size and rows that do not
depend on each other (`Products`), row maxima are exact, and partial sums are added in order of position, so a query's output
has the same bits in a long prefill, in a chunk, in a batch and alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rackserve.base.units import blocks_for
from rackserve.model.kv_arena import KvArena
from rackserve.model.products import MIN_ROWS, batch_agrees, choose

PARTITION_TOKENS = 128
"""Key positions per partition, rounded to whole blocks. The bits of an output depend on it."""

TILE_TOKENS = 64
"""Query positions of one sequence handled at once: bounds the score matrix. No effect on the bits."""

PIECE_PARTITIONS = 6
"""Partitions gathered and widened at once, so that they stay in the cache of a core. No effect on the bits."""


@dataclass(slots=True)
class Span:
    """`num_tokens` consecutive query positions from `start` on of a sequence whose KV lies in `blocks`."""

    blocks: Sequence[int]
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(slots=True)
class Piece:
    """Partitions [begin, end) of a tile.

    keys, values  int64 [(end - begin) * kv_heads * blocks per partition]: arena rows of layer 0
    dead          int64: rows of the gathered values [(end - begin) * kv_heads * T] past the end of a sequence
    """

    begin: int
    end: int
    keys: Tensor
    values: Tensor
    dead: Tensor


@dataclass(slots=True)
class Tile:
    """`batch` queries of `tokens` positions each and the partitions they attend to.

    owner  int64 [P]: which query of the batch a partition belongs to, ascending
    mask   bool [P - unmasked, 1, tokens, 1, T]: True where a key lies after the query; partitions before are all seen
    """

    batch: int
    tokens: int
    owner: Tensor
    unmasked: int
    mask: Tensor
    pieces: tuple[Piece, ...]


class Attention:
    """Attention with `heads` query heads over one arena. `products`: how its matrix products are computed here.

    Its scratch memory lasts, because fresh pages cost more than the copy into them.
    """

    __slots__ = ("_arena", "_blocks", "_stored", "_wide", "_width", "products")

    def __init__(self, arena: KvArena, heads: int) -> None:
        self._arena = arena
        self._blocks = max(1, PARTITION_TOKENS // arena.block_tokens)
        self._width = self._blocks * arena.block_tokens
        shape = (PIECE_PARTITIONS * arena.kv_heads, self._width, arena.head_dim)
        self._stored = torch.empty(shape, dtype=arena.dtype)
        self._wide = self._stored if arena.dtype == torch.float32 else torch.empty(shape)
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(shape[0], TILE_TOKENS * heads // arena.kv_heads, arena.head_dim, generator=generator)
        keys, values = torch.randn(2, *shape, generator=generator)
        scores = torch.rand(*query.shape[:2], self._width, generator=generator)
        tried = ((query, keys.transpose(1, 2)), (scores, values))
        self.products = choose(lambda products: all(batch_agrees(products, *pair, arena.kv_heads) for pair in tried))

    def plan(self, spans: Sequence[Span]) -> list[Tile]:
        """Where the queries of one step read, for `attend` of every layer. Spans of one token come first."""
        singles = [span for span in spans if span.num_tokens == 1]
        longer = [span for span in spans if span.num_tokens > 1]
        return [*([self._batch(singles)] if singles else []), *(tile for span in longer for tile in self._tiles(span))]

    def attend(self, layer: int, plan: Sequence[Tile], query: Tensor, out: Tensor) -> None:
        """Attention of `query` [rows, heads, head_dim] over the arena's `layer` into `out` [rows, heads * head_dim]."""
        row = 0
        for tile in plan:
            end = row + tile.batch * tile.tokens
            out[row:end] = self._attend_tile(layer, tile, query[row:end])
            row = end

    def _batch(self, spans: Sequence[Span]) -> Tile:
        """One tile for the last positions of several sequences."""
        counts = torch.tensor([blocks_for(span.end, self._width) for span in spans])
        owner = torch.repeat_interleave(torch.arange(len(spans)), counts)
        number = torch.arange(len(owner)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        ends = torch.tensor([span.end for span in spans])[owner]
        live = number[:, None] * self._width + torch.arange(self._width) < ends[:, None]
        table = [block for span in spans for block in self._padded(span.blocks, span.end)]
        return Tile(len(spans), 1, owner, 0, ~live[:, None, None, None, :], self._pieces(table, live))

    def _tiles(self, span: Span) -> list[Tile]:
        """The tiles of one long span; each reads only the partitions its last position sees."""
        tiles = []
        for first in range(span.start, span.end, TILE_TOKENS):
            end = min(first + TILE_TOKENS, span.end)
            seen, unmasked = blocks_for(end, self._width), first // self._width
            keys = torch.arange(seen * self._width).view(seen, self._width)
            mask = keys[unmasked:, None, None, None, :] > torch.arange(first, end)[:, None, None]
            pieces = self._pieces(self._padded(span.blocks, end), keys < end)
            tiles.append(Tile(1, end - first, torch.zeros(seen, dtype=torch.int64), unmasked, mask, pieces))
        return tiles

    def _padded(self, blocks: Sequence[int], end: int) -> list[int]:
        """The block table of positions [0, end) up to a whole number of partitions; what pads it is masked."""
        padding = blocks_for(end, self._width) * self._blocks - blocks_for(end, self._arena.block_tokens)
        return [*blocks[: blocks_for(end, self._arena.block_tokens)], *[blocks[0]] * padding]

    def _pieces(self, table: Sequence[int], live: Tensor) -> tuple[Piece, ...]:
        """Partitions of the padded block `table`; `live` bool [P, T] says which of their positions exist."""
        rows = self._arena.rows_of(torch.tensor(table, dtype=torch.int64).view(-1, self._blocks))
        keys, values = rows.transpose(1, 2).unbind(0)  # each [P, kv_heads, blocks]
        dead = ~live[:, None, :].expand(-1, self._arena.kv_heads, -1)
        pieces = []
        for begin in range(0, len(live), PIECE_PARTITIONS):
            end = min(begin + PIECE_PARTITIONS, len(live))
            gone = dead[begin:end].reshape(-1).nonzero().view(-1)
            pieces.append(Piece(begin, end, keys[begin:end].reshape(-1), values[begin:end].reshape(-1), gone))
        return tuple(pieces)

    def _read(self, layer: int, rows: Tensor) -> Tensor:
        """Keys or values at `rows`, straight from the arena, as float32 [partitions * kv_heads, T, head_dim]."""
        count = len(rows) // self._blocks
        stored, wide = self._stored[:count], self._wide[:count]
        self._arena.read(layer, rows, stored)
        if wide.dtype != stored.dtype:
            wide.copy_(stored)
        return wide

    def _attend_tile(self, layer: int, tile: Tile, query: Tensor) -> Tensor:
        """Softmax attention: `query` [batch * tokens, heads, head_dim] -> [batch * tokens, heads * head_dim].

        A query head reads kv head `head // shared`; the rows of a product are the tokens and heads that share a kv head.
        """
        kv_heads, width, batch, tokens = self._arena.kv_heads, self._width, tile.batch, tile.tokens
        _, heads, head_dim = query.shape
        seen, shared = len(tile.owner), heads // kv_heads
        rows = tokens * shared
        padded = max(rows, MIN_ROWS)
        query = (query * head_dim**-0.5).view(batch, tokens, kv_heads, shared, head_dim).transpose(1, 2)
        query = query.reshape(batch, kv_heads, rows, head_dim)
        if rows < padded:
            query = torch.nn.functional.pad(query, (0, 0, 0, padded - rows))
        spread = query.index_select(0, tile.owner).view(-1, padded, head_dim)
        scores = torch.empty(seen * kv_heads, padded, width)
        for piece in tile.pieces:
            part = slice(piece.begin * kv_heads, piece.end * kv_heads)
            keys = self._read(layer, piece.keys).transpose(1, 2)
            self.products.bmm(spread[part], keys, scores[part], kv_heads)
        total = _softmax(scores.view(seen, kv_heads, padded, width), tile, rows)
        parts = torch.empty(seen * kv_heads, padded, head_dim)
        for piece in tile.pieces:
            part = slice(piece.begin * kv_heads, piece.end * kv_heads)
            values = self._read(layer, piece.values)
            if len(piece.dead):  # unused memory may hold anything, and 0 * NaN is NaN
                values.view(-1, head_dim).index_fill_(0, piece.dead, 0.0)
            self.products.bmm(scores[part], values, parts[part], kv_heads)
        mixed = torch.zeros(batch, kv_heads, padded, head_dim)
        mixed.index_add_(0, tile.owner, parts.view(seen, kv_heads, padded, head_dim))
        mixed = (mixed / total.unsqueeze(-1))[:, :, :rows].view(batch, kv_heads, tokens, shared, head_dim)
        return mixed.transpose(1, 2).reshape(batch * tokens, heads * head_dim)


def _softmax(scores: Tensor, tile: Tile, rows: int) -> Tensor:
    """Turn `scores` [P, kv_heads, rows, T] into unnormalised weights in place; returns their sums [batch, kv_heads, rows]."""
    seen, kv_heads, padded, width = scores.shape
    grid = scores[tile.unmasked :, :, :rows].view(seen - tile.unmasked, kv_heads, tile.tokens, -1, width)
    grid.masked_fill_(tile.mask, -torch.inf)
    peaks = scores.amax(-1)
    index = tile.owner[:, None, None].expand_as(peaks)
    peak = torch.full((tile.batch, kv_heads, padded), -torch.inf).scatter_reduce_(0, index, peaks, "amax")
    scores.sub_(peak.index_select(0, tile.owner).unsqueeze(-1)).exp_()
    return torch.zeros(tile.batch, kv_heads, padded).index_add_(0, tile.owner, scores.sum(-1))
