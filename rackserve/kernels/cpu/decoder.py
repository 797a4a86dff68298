"""A Llama decoder's step in one native call."""

from __future__ import annotations

import ctypes
import mmap
import struct
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rackserve.base.errors import ConfigError, ResourceError
from rackserve.kernels.cpu.library import PICK, Floats, Library, MatrixView, no_room, places, view_of
from rackserve.kernels.cpu.packing import Bytes

HEAD_MULTIPLE = 16
MAX_HEAD = 256
MAX_SHARED = 16
"""Query heads to a kv head (a part of TILE in src/attention.h)."""

SPAN = "Pii"
"""`RkSpan` of src/decoder.h: a block table's address, the first position, positions."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix and its kind."""

    data: Bytes
    kind: int

    def view(self) -> MatrixView:
        return view_of(self.data, self.kind)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer; `qkv` and `gate_up` are their parts one below the other."""

    attention_norm: Floats
    ffn_norm: Floats
    qkv: Packed
    output: Packed
    gate_up: Packed
    down: Packed


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All that a step reads but the cache. cosine, sine: float32 [positions, head_dim / 2]."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    layers: tuple[DecoderLayer, ...]
    norm: Floats
    embedding: Packed
    head: Packed
    cosine: Floats
    sine: Floats


class _Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p), ("ffn_norm", c_void_p),
        ("qkv", MatrixView), ("output", MatrixView), ("gate_up", MatrixView), ("down", MatrixView),
    )  # fmt: skip


class _Model(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "layers", "max_rows")),
        ("norm_eps", c_float), ("layer", POINTER(_Layer)), ("norm", c_void_p),
        ("embedding", MatrixView), ("head", MatrixView), ("cosine", c_void_p), ("sine", c_void_p),
    )  # fmt: skip


Ints = Sequence[int] | NDArray[np.int32]


@dataclass(slots=True)
class Rows:
    """`count` positions from `start` on of a sequence with block table `blocks`; an array of "i" is read where it lies."""

    blocks: Ints
    start: int
    count: int
    table: array[int] | NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.table = self.blocks if isinstance(self.blocks, array) else np.asarray(self.blocks, np.int32)


class Decoder:
    """Steps over blocks in `arena`, which lie as [layer][key, value][kv head][position][head dim].

    wide       bytes of a stored number: 2 (bf16) or 4 (float32)
    max_rows   positions of one step; buffers for so many are made once
    threads    cores that share a step, the caller's among them; no effect on any bit
    cores      where the others run, one each behind the first; (): wherever the system wants

    ConfigError for shapes that the kernels do not know, ResourceError if memory or threads run out.
    """

    def __init__(
        self,
        library: Library,
        weights: DecoderWeights,
        arena: memoryview | mmap.mmap,
        *,
        wide: int,
        block_tokens: int,
        max_rows: int,
        threads: int = 1,
        cores: Sequence[int] = (),
    ) -> None:
        shared = weights.heads // weights.kv_heads
        if weights.head_dim % (2 * HEAD_MULTIPLE) or weights.head_dim > MAX_HEAD or shared > MAX_SHARED:
            raise ConfigError(
                f"heads of {weights.head_dim} and {shared} query heads to a kv head: kernels want multiples of "
                f"{2 * HEAD_MULTIPLE} up to {MAX_HEAD}, and up to {MAX_SHARED}"
            )
        self._library = library
        self._keep = (weights, np.frombuffer(arena, np.uint8))
        self.vocab = weights.vocab
        self.max_rows = max_rows
        self._layers = (_Layer * len(weights.layers))(*(_layer_of(layer) for layer in weights.layers))
        model = _Model(
            weights.hidden, weights.heads, weights.kv_heads, weights.head_dim, weights.ffn, weights.vocab,
            len(weights.layers), max_rows, weights.norm_eps, self._layers, weights.norm.ctypes.data,
            weights.embedding.view(), weights.head.view(), weights.cosine.ctypes.data, weights.sine.ctypes.data,
        )  # fmt: skip
        arena_at = self._keep[1].ctypes.data
        self._decoder = library.c.rk_decoder_new(
            ctypes.byref(model), arena_at, wide, block_tokens, threads, places(cores, threads)
        )
        if not self._decoder:
            raise no_room(max_rows, threads)

    def forward(self, tokens: Ints, spans: Sequence[Rows]) -> None:
        """Compute positions and store their KV. `tokens`: those of all spans, one after the other, at most `max_rows`."""
        given = struct.pack(SPAN * len(spans), *chain.from_iterable((_at(s.table), s.start, s.count) for s in spans))
        ids = _in_memory(tokens)
        self._check(self._library.c.rk_decoder_forward(self._decoder, given, len(spans), _at(ids)))

    def logits(self, rows: Ints, out: Floats | None = None) -> Floats:
        """Logits float32 [n, vocab] of rows of the last `forward`, in `out` if given."""
        out = np.empty((len(rows), self.vocab), np.float32) if out is None else out
        self.pick(rows, out)
        return out

    def pick(self, rows: Ints, full: Floats | None = None) -> tuple[Sequence[int], Sequence[float]]:
        """The likeliest token of each of `rows` of the last `forward`, and its logit.

        The lowest id among equals; a NaN counts as the largest, the first among several. Logits of the first of `rows` go to
        `full` [n, vocab]; the others' are never written.
        """
        wanted, picks = _in_memory(rows), array("q", bytes(8 * len(rows)))
        out, count = (None, 0) if full is None else (full.ctypes.data, len(full))
        if len(rows):
            given = _at(wanted), len(rows), _at(picks), out, count
            self._check(self._library.c.rk_decoder_logits(self._decoder, *given))
        flat = struct.unpack(PICK * len(rows), picks)
        return flat[::2], flat[1::2]

    def time(self, on: bool) -> None:
        """Begin to count where steps spend their time, from zero on; or end it."""
        self._library.c.rk_decoder_time(self._decoder, on)

    def times(self) -> dict[str, float]:
        """CPU seconds of the leading thread by stage since `time(True)`; "wait": for the other threads."""
        names = self._library.stages
        seconds = np.zeros(len(names))
        self._library.c.rk_decoder_times(self._decoder, seconds.ctypes.data)
        return dict(zip(names, seconds.tolist(), strict=True))

    def close(self) -> None:
        """Let threads and buffers go."""
        decoder, self._decoder = self._decoder, None
        if decoder:
            self._library.c.rk_decoder_free(decoder)

    def __del__(self) -> None:
        if getattr(self, "_decoder", None):
            self.close()

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise ResourceError("a step found no memory for its attention; lower scheduler.max_tokens")


def _layer_of(layer: DecoderLayer) -> _Layer:
    norms = layer.attention_norm.ctypes.data, layer.ffn_norm.ctypes.data
    return _Layer(*norms, layer.qkv.view(), layer.output.view(), layer.gate_up.view(), layer.down.view())


def _in_memory(numbers: Ints) -> array[int] | NDArray[np.int32]:
    return numbers if isinstance(numbers, np.ndarray) else array("i", numbers)


def _at(numbers: array[int] | NDArray[np.int32]) -> int:
    """Where they lie. Arrays tell it several times as fast as numpy's."""
    return numbers.buffer_info()[0] if isinstance(numbers, array) else numbers.ctypes.data
