"""Llama decoders of any shape between fences, and what they compute in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from rackserve.kernels.cpu.decoder import Decoder, DecoderLayer, DecoderWeights, Packed, Rows
from rackserve.kernels.cpu.library import Library
from tests.kernels.cpu.variants import KINDS, rounded
from tests.kernels.fence import POISON, Fence

Doubles = NDArray[np.float64]
HALVES = {"q4_1": 4, "q4_1, 8 bits": 4, "q8_0": 2}
"""Bytes of halves at the beginning of a stored block."""

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder and of its cache. kinds: of the layers' matrices, and of the vocabulary's."""

    kv_heads: int
    shared: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    layers: int
    block_tokens: int
    wide: int
    kinds: tuple[str, str]

    @property
    def heads(self) -> int:
        return self.kv_heads * self.shared


class Drawn:
    """A random decoder; its weights may only be read, and end where nothing follows."""

    def __init__(self, shape: Shape, positions: int, seed: int) -> None:
        self._rng, self.fence, self.shape = np.random.default_rng(seed), Fence(), shape
        width, hidden = shape.heads * shape.head_dim, shape.hidden
        sizes = {
            "qkv": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, hidden),
            "output": (hidden, width),
            "gate_up": (2 * shape.ffn, hidden),
            "down": (hidden, shape.ffn),
        }
        self.layers: list[dict[str, Doubles]] = []
        layers = []
        for _ in range(shape.layers):
            made = {name: self._matrix(shape.kinds[0], *size) for name, size in sizes.items()}
            norms = {name: self._norm() for name in ("attention_norm", "ffn_norm")}
            layers.append(DecoderLayer(**norms, **{name: packed for name, (packed, _) in made.items()}))
            self.layers.append({**norms, **{name: values for name, (_, values) in made.items()}})
        (embedding, self.embedding), (head, self.head) = (self._matrix(shape.kinds[1], shape.vocab, hidden) for _ in range(2))
        half = np.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = np.outer(np.arange(positions), 100.0**-half)
        self.norm = self._norm()
        self.cosine, self.sine = (self.fence.copy(table(angles).astype(np.float32)) for table in (np.cos, np.sin))
        self.weights = DecoderWeights(
            hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab, NORM_EPS, tuple(layers), self.norm,
            embedding, head, self.cosine, self.sine,
        )  # fmt: skip

    def _norm(self) -> NDArray[Any]:
        return self.fence.copy(self._rng.uniform(0.5, 1.5, self.shape.hidden).astype(np.float32))

    def _matrix(self, kind: str, outputs: int, inputs: int) -> tuple[Packed, Doubles]:
        """Numbers whose products with ordinary rows are ordinary."""
        make, pack, code = KINDS[kind]
        stored, values = make(self._rng, outputs, inputs)
        size = 2.0 ** -np.ceil(np.log2(np.sqrt(inputs) * values.std()))
        if kind == "bf16":
            stored = ((values * np.float32(size)).view(np.uint32) >> 16).astype(np.uint16)
            values = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            halves = stored[..., : HALVES[kind]].copy().view(np.float16) * np.float16(size)
            stored[..., : HALVES[kind]] = halves.view(np.uint8)
            quantisation = GGMLQuantizationType.Q8_0 if kind == "q8_0" else GGMLQuantizationType.Q4_1
            values = quants.dequantize(stored.reshape(outputs, -1), quantisation)
        return Packed(self.fence.copy(pack(stored)), code), values.astype(np.float64)  # type: ignore[operator]


class Running:
    """A decoder over an arena of exactly `num_blocks` blocks of poison."""

    def __init__(self, library: Library, drawn: Drawn, num_blocks: int, max_rows: int, threads: int) -> None:
        shape = drawn.shape
        self._drawn, self._fence, self._max_rows = drawn, drawn.fence, max_rows
        sizes = (num_blocks, shape.layers, 2, shape.kv_heads, shape.block_tokens, shape.head_dim * shape.wide)
        self.arena = self._fence.empty(sizes, np.uint8)
        self._written = np.zeros(sizes[:1] + sizes[4:5], bool)
        self._decoder = Decoder(
            library, drawn.weights, memoryview(self.arena).cast("B"), wide=shape.wide, block_tokens=shape.block_tokens,
            max_rows=max_rows, threads=threads,
        )  # fmt: skip

    def spoil(self, blocks: list[int]) -> None:
        """Leave NaN in all buffers of a step: with rows that see a position which nobody wrote, in two spare blocks."""
        written = self._written.copy()
        assert np.isnan(np.concatenate(self.forward([(blocks, 1, np.zeros(1, np.int32))] * self._max_rows))).all()
        self.arena[blocks], self._written = POISON, written

    def forward(self, parts: list[tuple[list[int], int, NDArray[np.int32]]]) -> list[NDArray[Any]]:
        """Logits of every row of some block tables, starts and tokens."""
        size = self._drawn.shape.block_tokens
        spans = []
        for blocks, start, tokens in parts:
            span = Rows(blocks, start, len(tokens))
            span.table = self._fence.copy(span.table[: -(-(start + len(tokens)) // size)])
            spans.append(span)
            for position in range(start, start + len(tokens)):
                self._written[blocks[position // size], position % size] = True
        tokens = self._fence.copy(np.concatenate([tokens for *_, tokens in parts]))
        self._decoder.forward(tokens, spans)
        out = self._fence.empty((len(tokens), self._drawn.shape.vocab))
        wanted = self._fence.copy(np.arange(len(tokens), dtype=np.int32))
        self._decoder.logits(wanted, out)
        assert np.array_equal(self._decoder.pick(wanted)[0], out.argmax(-1))
        return np.split(out, np.cumsum([len(tokens) for *_, tokens in parts])[:-1])

    def check(self) -> None:
        """Positions that were computed are in the arena, and nothing else."""
        by_position = self.arena.transpose(0, 4, 1, 2, 3, 5)
        assert (by_position[~self._written] == POISON).all()
        numbers = self.stored(by_position[self._written])
        assert np.isfinite(numbers).all()
        self._fence.check()

    def stored(self, rows: NDArray[np.uint8]) -> Doubles:
        """Rows of bytes as numbers."""
        rows = np.ascontiguousarray(rows)
        if self._drawn.shape.wide == 4:
            return rows.view(np.float32).astype(np.float64)
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def kv(self, blocks: list[int], length: int) -> Doubles:
        """What the arena has of a sequence: [layers, 2, kv heads, length, head dim]."""
        layers, kinds, heads, _, width = self.arena.shape[1:]
        rows = self.arena[blocks].transpose(1, 2, 3, 0, 4, 5).reshape(layers, kinds, heads, -1, width)
        return self.stored(rows[:, :, :, :length])

    def close(self) -> None:
        self._decoder.close()


def reference(drawn: Drawn, tokens: NDArray[np.int32], kv: Doubles) -> tuple[Doubles, Doubles]:
    """Logits [n, vocab] and KV as in `Running.kv`, in float64. Rows are rounded as kinds say; attention reads `kv`."""
    shape, kind, count = drawn.shape, drawn.shape.kinds[0], len(tokens)
    hidden, made = drawn.embedding[tokens], []
    cosine, sine = (table[:count, None].astype(np.float64) for table in (drawn.cosine, drawn.sine))
    for layer, (keys, values) in zip(drawn.layers, kv, strict=True):
        heads = times(normed(hidden, layer["attention_norm"]), layer["qkv"], kind).reshape(count, -1, shape.head_dim)
        turning, fresh = np.split(heads, [shape.heads + shape.kv_heads], 1)
        low, high = np.split(turning, 2, -1)
        turned = np.concatenate([low * cosine - high * sine, high * cosine + low * sine], -1)
        queries, own = np.split(turned, [shape.heads], 1)
        made.append(np.stack([own.transpose(1, 0, 2), fresh.transpose(1, 0, 2)]))
        grouped = queries.reshape(count, shape.kv_heads, shape.shared, -1)
        scores = np.einsum("qhsd,hkd->hsqk", grouped, keys) / np.sqrt(shape.head_dim)
        scores[..., np.triu(np.ones((count, count), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hsqk,hkd->qhsd", weights, values).reshape(count, -1)
        hidden = hidden + times(mixed, layer["output"], kind)
        gate, up = np.split(times(normed(hidden, layer["ffn_norm"]), layer["gate_up"], kind), 2, -1)
        hidden = hidden + times(gate / (1 + np.exp(-gate)) * up, layer["down"], kind)
    return times(normed(hidden, drawn.norm), drawn.head, shape.kinds[1]), np.stack(made)


def times(rows: Doubles, matrix: Doubles, kind: str) -> Doubles:
    return rounded(rows, kind)[0] @ matrix.T  # type: ignore[arg-type,no-any-return]


def normed(rows: Doubles, weight: NDArray[Any]) -> Doubles:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + NORM_EPS) * weight
