"""Which model a rank process runs, as data, and how it is opened."""

from __future__ import annotations

import logging
from typing import Literal, Protocol

import msgspec

from rackserve.base.kv_layout import KvLayout
from rackserve.base.ranges import MAX_COUNT, require_range
from rackserve.base.step import Step, StepResult
from rackserve.base.units import MIB
from rackserve.digest_model import DigestRunner, digest_layout
from rackserve.model.extra import require_engine

MAX_BLOCK_TOKENS = 65_536

log = logging.getLogger("rackserve.live")


class Runner(Protocol):
    """A model that computes steps of one rank. `run` is called from one thread; an exception fails the step."""

    layout: KvLayout

    def run(self, step: Step) -> StepResult: ...


class RunnerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model of a rack.

    kind          "digest": the toy model, no weights; "llama": a real model on CPU
    model         name or folder of the model (llama)
    dtype         number format of weights and KV (llama): "bf16" or "fp32"
    block_tokens  token positions per KV block
    vocab_size    token ids (digest)
    window        whether KV has a resume state beside the blocks (digest)
    """

    kind: Literal["digest", "llama"] = "digest"
    model: str = "smollm2-135m"
    dtype: Literal["bf16", "fp32"] = "bf16"
    block_tokens: int = 16
    vocab_size: int = 64
    window: bool = False

    def __post_init__(self) -> None:
        require_range("runner", self, ("block_tokens",), 1, MAX_BLOCK_TOKENS)
        require_range("runner", self, ("vocab_size",), 1, MAX_COUNT)


def layout_of(spec: RunnerSpec) -> KvLayout:
    """KV layout of the model, without its weights. May read (or fetch) model files: not for the event loop."""
    if spec.kind == "digest":
        return digest_layout(spec.block_tokens, window=spec.window)
    from rackserve.model.files import open_model
    from rackserve.model.layout import kv_layout

    return kv_layout(open_model(spec.model).config, spec.block_tokens, spec.dtype)


def process_bytes(spec: RunnerSpec) -> int:
    """About how much memory a rank process takes besides its KV: weights widened to float32, and the libraries."""
    if spec.kind == "digest":
        return 50 * MIB
    from rackserve.model.files import open_model
    from rackserve.model.loader.folder import weight_files

    return 400 * MIB + 2 * sum(path.stat().st_size for path in weight_files(open_model(spec.model).path))


def require_packages(spec: RunnerSpec) -> None:
    """ResourceError with the remedy if a package is missing that the model needs to compute; its layout needs none."""
    if spec.kind == "llama":
        require_engine()


def open_runner(spec: RunnerSpec, arena: memoryview, num_blocks: int) -> Runner:
    """Load the model for a rank whose KV blocks and window slots live in `arena`. It computes on one thread.

    Logs one line if this machine's matrix products must be cut so that an answer cannot depend on its neighbours.
    """
    if spec.kind == "digest":
        return DigestRunner(arena, num_blocks, layout_of(spec), spec.vocab_size)
    import torch

    from rackserve.model.files import open_model
    from rackserve.model.products import TILE_ROWS
    from rackserve.model.runner import LlamaRunner

    torch.set_num_threads(1)
    runner = LlamaRunner(open_model(spec.model), arena, num_blocks, spec.block_tokens, dtype=spec.dtype)
    if runner.products != "direct":
        how = f"in tiles of {TILE_ROWS} rows" if runner.products == "tiled" else "row by row"
        log.warning("matrix products on this CPU round by the number of rows; computing %s, so that answers do not change", how)
    return runner
