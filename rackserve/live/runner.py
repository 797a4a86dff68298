"""Which model a rank process runs, as data, and how it is opened."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.kv_layout import KvLayout
from rackserve.base.step import Step, StepResult
from rackserve.digest_model import DigestRunner, digest_layout


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
        if self.block_tokens < 1:
            raise ConfigError(f"runner.block_tokens must be at least 1, got {self.block_tokens}")


def layout_of(spec: RunnerSpec) -> KvLayout:
    """KV layout of the model, without its weights. May read (or fetch) model files: not for the event loop."""
    if spec.kind == "digest":
        return digest_layout(spec.block_tokens, window=spec.window)
    from rackserve.model.files import open_model
    from rackserve.model.kv_arena import kv_layout

    return kv_layout(open_model(spec.model).config, spec.block_tokens, spec.dtype)


def open_runner(spec: RunnerSpec, arena: memoryview, num_blocks: int) -> Runner:
    """Load the model for a rank whose KV blocks and window slots live in `arena`. It computes on one thread."""
    if spec.kind == "digest":
        return DigestRunner(arena, num_blocks, layout_of(spec), spec.vocab_size)
    import torch

    from rackserve.model.files import open_model
    from rackserve.model.runner import LlamaRunner

    torch.set_num_threads(1)
    return LlamaRunner(open_model(spec.model), arena, num_blocks, spec.block_tokens, dtype=spec.dtype)
