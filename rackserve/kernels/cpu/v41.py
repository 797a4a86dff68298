"""A DeepSeek-V4.1 pass in one native call: the plan that C reads (src/v41_plan.h) and the calls on it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Array, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rackserve.base.errors import ResourceError
from rackserve.kernels.cpu.library import Floats, Library, no_room, places
from rackserve.kernels.cpu.mailbox import Mailbox
from rackserve.kernels.cpu.packing import LANES, Bytes
from rackserve.kernels.cpu.v41_packing import Packed
from rackserve.kernels.cpu.v41_tuning import ALL_ON, Tuning

MAX_STREAMS = 4
"""Residual streams that the kernels know: this many and no other number."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """fn [24, 4 * hidden]; scale and base float32 [24]."""

    fn: Packed
    scale: Floats
    base: Floats


@dataclass(frozen=True, slots=True)
class Expert:
    """A gated network: gate, down and up, as the checkpoint numbers them."""

    w1: Packed
    w2: Packed
    w3: Packed


@dataclass(frozen=True, slots=True)
class Block:
    """Attention and experts of a layer or stage, under the checkpoint's names. experts: routed ones, then the shared one."""

    attn_mixer: Mixer
    ffn_mixer: Mixer
    wq_a: Packed
    wq_b: Packed
    wkv: Packed
    wo_a: Packed
    wo_b: Packed
    gate: Packed
    attn_norm: Floats
    ffn_norm: Floats
    q_norm: Floats
    kv_norm: Floats
    sink: Floats
    bias: Floats
    experts: tuple[Expert, ...]
    top: int


@dataclass(frozen=True, slots=True)
class Compressor:
    """gate: None where no tokens are joined. main, index: where its rows begin in a block, in bytes."""

    wkv: Packed
    gate: Packed | None
    wk: Packed
    norm: Floats
    k_norm: Floats
    main: int
    index: int


@dataclass(frozen=True, slots=True)
class Indexer:
    """What choosing compressed rows needs beside the attention."""

    wq_b: Packed
    weights: Packed


@dataclass(frozen=True, slots=True)
class Layer:
    """A block and what else the layer has, by number in the plan's lists, -1: nothing (see src/v41_plan.h)."""

    block: Block
    ratio: int
    source: int
    compressor: int
    indexer: int
    engram: int
    target: int
    open: int
    is_candidate_source: bool


@dataclass(frozen=True, slots=True)
class Engram:
    """weight: float32 [4, hidden]."""

    wkv: Packed
    weight: Floats


@dataclass(frozen=True, slots=True)
class Draft:
    """confidence: float32 [hidden + rank]; embed: bf16 bits [vocab, rank]."""

    main: Packed
    markov: Packed
    main_norm: Floats
    norm: Floats
    confidence: Floats
    embed: NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Plan:
    """All that passes read but the cache. sizes: the numbers of the model by their names in src/v41_plan.h.

    embed: bf16 bits [vocab, hidden]; freqs, compressed_freqs: float32 [pairs], angles per position
    """

    sizes: dict[str, int | float]
    layers: tuple[Layer, ...]
    compressors: tuple[Compressor, ...]
    indexers: tuple[Indexer, ...]
    engrams: tuple[Engram, ...]
    stages: tuple[Block, ...]
    draft: Draft
    head: Packed
    embed: NDArray[np.uint16]
    norm: Floats
    freqs: Floats
    compressed_freqs: Floats


class _Matrix(Structure):
    _fields_ = (
        ("codes", c_void_p), ("scales", c_void_p),
        ("kind", c_int32), ("outputs", c_int32), ("inputs", c_int32), ("quantised", c_int32),
    )  # fmt: skip


class _Mixer(Structure):
    _fields_ = (("fn", _Matrix), ("scale", c_void_p), ("base", c_void_p))


class _Expert(Structure):
    _fields_ = tuple((name, _Matrix) for name in ("w1", "w2", "w3"))


class _Block(Structure):
    _fields_ = (
        ("attn_mixer", _Mixer), ("ffn_mixer", _Mixer),
        *((name, _Matrix) for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "gate")),
        *((name, c_void_p) for name in ("attn_norm", "ffn_norm", "q_norm", "kv_norm", "sink", "bias", "experts")),
        ("num_experts", c_int32), ("top", c_int32),
    )  # fmt: skip


class _Compressor(Structure):
    _fields_ = (
        ("wkv", _Matrix), ("gate", _Matrix), ("wk", _Matrix), ("norm", c_void_p), ("k_norm", c_void_p),
        ("main", c_int64), ("index", c_int64),
    )  # fmt: skip


class _Indexer(Structure):
    _fields_ = (("wq_b", _Matrix), ("weights", _Matrix))


class _Layer(Structure):
    _fields_ = (
        ("block", _Block),
        *((name, c_int32) for name in (
            "ratio", "source", "compressor", "indexer", "engram", "target", "open", "is_candidate_source",
        )),
    )  # fmt: skip


class _Engram(Structure):
    _fields_ = (("wkv", _Matrix), ("weight", c_void_p))


class _Draft(Structure):
    _fields_ = (
        ("main", _Matrix), ("markov", _Matrix),
        *((name, c_void_p) for name in ("main_norm", "norm", "confidence", "embed")),
    )  # fmt: skip


SIZES = (
    "vocab", "hidden", "layers", "stages", "heads", "head_dim", "pairs", "q_rank", "o_groups", "o_rank", "inner", "window",
    "index_heads", "index_dim", "topk", "candidate_blocks", "candidate_size", "first_decoder",
    "engrams", "engram_inputs", "targets", "block_size", "noise", "markov_rank", "iterations",
    "max_rows", "block_tokens", "round_inputs", "experts", "inline_shared", "early_gathers", "fused_sums",
)  # fmt: skip
NUMBERS = ("hc_eps", "norm_eps", "swiglu_limit", "routed_scale")


class _Model(Structure):
    _fields_ = (
        *((name, c_int32) for name in SIZES),
        *((name, c_float) for name in NUMBERS),
        *((name, c_void_p) for name in ("layer", "compressor", "indexer", "engram", "stage")),
        ("draft", _Draft), ("head", _Matrix),
        *((name, c_void_p) for name in ("embed", "norm", "freqs", "compressed_freqs", "arena")),
        ("block_bytes", c_int64), ("mailbox", c_void_p),
    )  # fmt: skip


class Span(Structure):
    """Positions [start, start + rows) of a sequence, by the addresses of its state: see src/v41_plan.h."""

    _fields_ = (
        ("blocks", c_void_p), ("windows", c_void_p), ("valid", c_void_p), ("open", c_void_p),
        ("start", c_int64), ("full_from", c_int64), ("rows", c_int32), ("replayed", c_int32),
    )  # fmt: skip


class Result(Structure):
    """Where a pass writes, by address: see src/v41_plan.h."""

    _fields_ = tuple((name, c_void_p) for name in ("windows", "pending", "features", "hidden"))


class _Building:
    """Turns values into C's, and keeps alive what those point to."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    def keep(self, thing: Any) -> Any:
        self.kept.append(thing)
        return thing

    def array(self, values: Floats | Bytes | NDArray[np.uint16]) -> int:
        return int(self.keep(np.ascontiguousarray(values)).ctypes.data)

    def matrix(self, packed: Packed | None) -> _Matrix:
        if packed is None:
            return _Matrix()
        codes, scales = self.array(packed.codes), int(self.keep(packed.scales).ctypes.data)
        return _Matrix(codes, scales, packed.kind, packed.outputs, packed.inputs, packed.quantised)

    def list(self, kind: type[Structure], values: Sequence[Any]) -> int:
        """Address of an array of `kind` with `values`."""
        made: Array[Structure] = self.keep((kind * max(1, len(values)))(*(self.value(kind, value) for value in values)))
        return ctypes.addressof(made)

    def value(self, kind: type[Structure], value: Any) -> Structure:
        """`kind` with the fields of a dataclass, by name."""
        made = kind()
        for field in fields(value):
            given = getattr(value, field.name)
            if field.name == "experts":
                made.experts, made.num_experts = self.list(_Expert, given), len(given)
            else:
                setattr(made, field.name, self.converted(given))
        return made

    def converted(self, given: Any) -> Any:
        if given is None or isinstance(given, Packed):
            return self.matrix(given)
        if isinstance(given, np.ndarray):
            return self.array(given)
        if isinstance(given, Mixer):
            return self.value(_Mixer, given)
        if isinstance(given, Block):
            return self.value(_Block, given)
        return given


class Step:
    """Passes over an arena at address `arena`, of `block_bytes` a block.

    max_rows   rows of one pass; buffers for so many are made once
    threads    cores that share a pass, the caller's among them; no effect on any bit
    cores      where the others run, one each behind the first; (): wherever the system wants
    mailbox    to the devices that the plan's matrices are shared with; all make the same calls. Must outlive the step

    ResourceError if memory or threads run out.
    """

    def __init__(
        self,
        library: Library,
        plan: Plan,
        arena: int,
        block_bytes: int,
        max_rows: int,
        threads: int = 1,
        cores: Sequence[int] = (),
        mailbox: Mailbox | None = None,
        tuning: Tuning = ALL_ON,
    ) -> None:
        self._c, building = library.c, _Building()
        _declare(self._c)
        model = _Model()
        for name, value in {**plan.sizes, **asdict(tuning), "max_rows": max_rows}.items():
            setattr(model, name, value)
        blocks = [*(layer.block for layer in plan.layers), *plan.stages]
        model.experts = max(len(block.experts) for block in blocks)
        model.layer, model.stage = building.list(_Layer, plan.layers), building.list(_Block, plan.stages)
        model.compressor = building.list(_Compressor, plan.compressors)
        model.indexer, model.engram = building.list(_Indexer, plan.indexers), building.list(_Engram, plan.engrams)
        model.draft, model.head = building.value(_Draft, plan.draft), building.matrix(plan.head)
        for name in ("embed", "norm", "freqs", "compressed_freqs"):
            setattr(model, name, building.array(getattr(plan, name)))
        model.arena, model.block_bytes = arena, block_bytes
        model.mailbox = mailbox.address if mailbox else None
        self._keep, self._mailbox, self.max_rows = (building, plan), mailbox, max_rows
        self._vocab = int(plan.sizes["vocab"])
        self._step = self._c.rk_v41_new(ctypes.byref(model), threads, places(cores, threads))
        if not self._step:
            raise no_room(max_rows, threads)

    def forward(self, spans: Array[Span], count: int, tokens: int, engram: Array[c_void_p], result: Result) -> int:
        """All layers over the rows of the first `count` spans; returns how many reach the end. tokens: ids, int64."""
        rows = int(self._c.rk_v41_forward(self._step, spans, count, tokens, engram, ctypes.byref(result)))
        if rows < 0:
            raise ResourceError("a step found no memory for its attention; lower scheduler.max_tokens")
        self._check()
        return rows

    def logits(self, hidden: int, count: int, out: int) -> None:
        """Float32 [count, vocab] to `out`, from float32 [count, hidden] at `hidden`."""
        self._c.rk_v41_logits(self._step, hidden, count, out)
        self._check()

    def learn(self, features: int, positions: int, count: int, rows: int) -> None:
        """Window rows of the stages, uint8 [stages, count, bytes] to `rows`, from features [count, targets * hidden]."""
        self._c.rk_v41_learn(self._step, features, positions, count, rows)

    def draft(self, spans: Array[Span], count: int, anchors: int, hidden: int, logits: int) -> None:
        """A block of drafts for each span: float32 [count, block, hidden] and [count, block, vocab]; anchors: int64.

        Where devices share the vocabulary, a row of logits is whole only after `follow`.
        """
        if self._c.rk_v41_draft(self._step, spans, count, anchors, hidden, logits) < 0:
            raise ResourceError("drafts found no memory for their attention; lower scheduler.max_tokens")
        self._check()

    def follow(self, tokens: int, count: int, hidden: int, logits: int, confidence: int, apart: int) -> None:
        """Add to every `apart`-th row of logits what the token (int64) before it says; set its confidence."""
        self._c.rk_v41_follow(self._step, tokens, count, hidden, logits, confidence, apart)
        self._check()

    def _check(self) -> None:
        if self._mailbox is not None:
            self._mailbox.check()

    def close(self) -> None:
        """Let threads and buffers go."""
        step, self._step = self._step, None
        if step:
            self._c.rk_v41_free(step)

    def __del__(self) -> None:
        if getattr(self, "_step", None):
            self.close()


def serves(library: Library) -> bool:
    """Whether the library was built with these kernels."""
    return hasattr(library.c, "rk_v41_new")


def product(library: Library, packed: Packed, rows: Floats) -> Floats:
    """`rows` [n, inputs] times a matrix: float32 [n, outputs]."""
    building = _Building()
    matrix, given = building.matrix(packed), np.ascontiguousarray(rows, np.float32)
    out = np.empty((len(rows), packed.outputs), np.float32)
    library.c.rk_v41_product.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
    library.c.rk_v41_product(ctypes.addressof(matrix), given.ctypes.data, len(rows), out.ctypes.data)
    return out


def _declare(c: ctypes.CDLL) -> None:
    c.rk_v41_new.restype, c.rk_v41_new.argtypes = c_void_p, [c_void_p, c_int32, c_void_p]
    c.rk_v41_free.argtypes = [c_void_p]
    c.rk_v41_forward.argtypes = [c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p]
    c.rk_v41_logits.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
    c.rk_v41_learn.argtypes = [c_void_p, c_void_p, c_void_p, c_int32, c_void_p]
    c.rk_v41_draft.argtypes = [c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p]
    c.rk_v41_follow.argtypes = [c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int32]


__all__ = ["LANES", "Plan", "Result", "Span", "Step", "product", "serves"]
