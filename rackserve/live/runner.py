"""Which model a rank process runs, as data, and how it is opened."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal, Protocol

from rackserve.base.errors import ConfigError
from rackserve.base.kv_layout import KvLayout
from rackserve.base.ranges import MAX_COUNT, require_range
from rackserve.base.request import Request
from rackserve.base.step import Step, StepResult
from rackserve.base.units import MIB, Time, to_seconds
from rackserve.digest_model import DigestRunner, digest_layout
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.extra import require_engine

if TYPE_CHECKING:
    from rackserve.model.files import ModelFiles
    from rackserve.model.parallel import Collectives
    from rackserve.model.sampling_state import Compile

MAX_BLOCK_TOKENS = 65_536
MAX_THREADS = 256
MAX_PACE = 1e6
"""Milliseconds a step, microseconds a token."""

log = logging.getLogger("rackserve.live")


class Runner(Protocol):
    """A model that computes steps of one rank. `run` is called from one thread; an exception fails the step."""

    layout: KvLayout

    def run(self, step: Step) -> StepResult: ...


class TimedRunner(Runner, Protocol):
    """A runner that knows how long it computed: `kernel_ns` is the time it spent in kernels so far; `path`: with what."""

    @property
    def kernel_ns(self) -> Time: ...

    @property
    def path(self) -> str: ...


class RunnerSpec(RunnerOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model of a rack. The fields of `RunnerOptions` are for deepseek_v41 alone.

    kind          "digest": the toy model, no weights; "llama" and "deepseek_v41": real models on CPU
    model         name or folder of the model (llama, deepseek_v41)
    dtype         how KV is stored (llama): "bf16" or "fp32"
    block_tokens  token positions per KV block
    vocab_size    token ids (digest)
    window        whether KV has a resume state beside the blocks (digest)
    kernels       what computes (real models): "native" code, "torch", or "auto", the first that can
    threads       cores that share a step of a device (native code); 0: those of the machine shared out over its devices
    step_ms, token_us  a step takes at least step_ms and token_us for each of its tokens (digest): a rack of known speed
    """

    kind: Literal["digest", "llama", "deepseek_v41"] = "digest"
    model: str = "smollm2-135m"
    dtype: Literal["bf16", "fp32"] = "bf16"
    block_tokens: int = 16
    vocab_size: int = 64
    window: bool = False
    kernels: Literal["auto", "native", "torch"] = "auto"
    threads: int = 0
    step_ms: float = 0.0
    token_us: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("runner", self, ("block_tokens",), 1, MAX_BLOCK_TOKENS)
        require_range("runner", self, ("vocab_size",), 1, MAX_COUNT)
        require_range("runner", self, ("threads",), 0, MAX_THREADS)
        require_range("runner", self, ("step_ms", "token_us"), 0, MAX_PACE)
        if self.kind != "digest" and (self.step_ms or self.token_us):
            raise ConfigError(f"runner.step_ms and runner.token_us mean nothing to runner.kind {self.kind}; leave them out")
        plain = RunnerOptions()
        changed = [name for name in RunnerOptions.__struct_fields__ if getattr(self, name) != getattr(plain, name)]
        if changed and self.kind != "deepseek_v41":
            raise ConfigError(f"runner.{changed[0]} is set, but means nothing to runner.kind {self.kind}; leave it out")

    @property
    def options(self) -> RunnerOptions:
        """The part a deepseek_v41 engine sees."""
        return RunnerOptions(**{name: getattr(self, name) for name in RunnerOptions.__struct_fields__})


class PacedRunner:
    """A runner whose steps take at least `step_ms` milliseconds, and `token_us` microseconds for each token; all is kernels."""

    __slots__ = ("_runner", "_step_s", "_token_s", "kernel_ns", "layout", "path")

    def __init__(self, runner: Runner, step_ms: float, token_us: float) -> None:
        self.layout = runner.layout
        self.path = "digest"
        self.kernel_ns: Time = 0
        self._runner = runner
        self._step_s = step_ms / 1e3
        self._token_s = token_us / 1e6

    def run(self, step: Step) -> StepResult:
        begin = time.monotonic_ns()
        result = self._runner.run(step)
        ahead = self._step_s + self._token_s * step.num_tokens - to_seconds(time.monotonic_ns() - begin)
        if ahead > 0.0:
            time.sleep(ahead)
        self.kernel_ns += time.monotonic_ns() - begin
        return result


def layout_of(spec: RunnerSpec) -> KvLayout:
    """KV layout of the model, without its weights. May read (or fetch) model files: not for the event loop."""
    if spec.kind == "digest":
        return digest_layout(spec.block_tokens, window=spec.window)
    from rackserve.model.files import open_model

    files = open_model(spec.model)
    if spec.kind == "deepseek_v41":
        from rackserve.model.deepseek_v41 import layout as deepseek_v41

        return deepseek_v41.kv_layout(files.deepseek_v41, spec.block_tokens, spec.resume)
    from rackserve.model.layout import kv_layout

    return kv_layout(files.llama, spec.block_tokens, spec.dtype)


def check_drafts(spec: RunnerSpec, num_draft: int) -> None:
    """ConfigError if the model cannot draft so many tokens a step: the rest would only take up room. May read model files."""
    if not num_draft or spec.kind == "digest":
        return
    most = 0
    if spec.kind == "deepseek_v41":
        from rackserve.model.files import open_model

        most = open_model(spec.model).deepseek_v41.dspark_block_size
    if num_draft > most:
        raise ConfigError(
            f"scheduler.num_draft is {num_draft}: this model drafts {most} tokens a step; set it to {most} or less"
        )


def process_bytes(spec: RunnerSpec, tp_size: int = 1, ep_size: int = 1) -> int:
    """About how much memory a device's process takes besides its KV: weights as they are held, and the libraries.

    tp_size, ep_size  devices that compute a rank together; ranks of the group
    """
    if spec.kind == "digest":
        return 50 * MIB
    from rackserve.model.files import open_model

    files = open_model(spec.model)
    if spec.kind == "llama":
        from rackserve.model.loader.folder import BLOCKS_FILE, weight_files

        blocks = files.path / BLOCKS_FILE
        stored = sum(path.stat().st_size for path in weight_files(files.path))
        if not _is_native(spec):
            return 400 * MIB + 2 * stored  # bf16, widened
        return 320 * MIB + (blocks.stat().st_size if blocks.exists() else stored)  # as they are stored
    from rackserve.model.deepseek_v41.layout import engram_row_bytes
    from rackserve.model.deepseek_v41.memory import Device, plan_device

    device = Device(
        role="prefill",
        tp_size=tp_size,
        ep_size=ep_size,
        num_blocks=0,
        num_states=0,
        max_sequences=0,
        max_batched_tokens=0,
        num_draft=0,
        weights="stored" if ep_size == 1 and _is_native(spec) else spec.weights,
        engram_shards=0,  # tables stay in the files
    )
    config = files.deepseek_v41
    hot = sum(min(spec.engram_hot_rows, rows) for rows in config.engram_num_embeddings) * engram_row_bytes(config)
    return 400 * MIB + plan_device(config, layout_of(spec), device).total_bytes + hot


def _is_native(spec: RunnerSpec) -> bool:
    """Whether native kernels compute, as far as that can be said before a rank has opened the model."""
    if spec.kernels == "torch":
        return False
    from rackserve.kernels.cpu.build import BUILT
    from rackserve.kernels.cpu.choice import FASTER_FOR_LLAMA, chosen

    name = chosen(BUILT)
    return bool(name) and ((spec.kind, spec.kernels) != ("llama", "auto") or name in FASTER_FOR_LLAMA)


def unsupported(spec: RunnerSpec, request: Request) -> str | None:
    """The field of `request` that the model cannot do, so that it would end as unsupported; None: it can do all."""
    if spec.kind == "digest":
        if request.sampling.constraint is not None:
            return "constraint"
        if request.prompt_logprobs >= 0:
            return "prompt_logprobs"
    return None


def require_packages(spec: RunnerSpec) -> None:
    """ResourceError with the remedy if a package is missing that the model needs to compute; its layout needs none."""
    if spec.kind != "digest":
        require_engine(spec.kind)


def _constraint_compiler(files: ModelFiles) -> Compile | None:
    """Compiles constraints over the model's tokenizer, which is read for the first one; None if the model has none."""
    if files.tokenizer_path is None:
        return None

    @cache
    def compiler() -> Compile:
        from rackserve.text.constraints import ConstraintCompiler
        from rackserve.text.tokenizer import Tokenizer

        return ConstraintCompiler(Tokenizer.from_folder(files.path), vocab_size=files.config.vocab_size)

    return lambda constraint: compiler()(constraint)


def open_runner(
    spec: RunnerSpec,
    arena: memoryview,
    num_blocks: int,
    collectives: Collectives | None = None,
    threads: int = 1,
    cores: Sequence[int] = (),
) -> TimedRunner:
    """Load the model for a rank whose KV blocks and window slots live in `arena`.

    threads, cores  that share a step, and where (see `live.cores`): for native kernels; torch computes on one
    collectives  to the other devices of the group, of which this process then loads and computes its part; None: it is alone.
    ConfigError if the model cannot be split so. Logs one line if what it computes or how is not the plain thing.
    """
    if spec.kind == "digest":
        digest = DigestRunner(arena, num_blocks, layout_of(spec), spec.vocab_size)
        return PacedRunner(digest, spec.step_ms, spec.token_us)
    import torch

    from rackserve.model.files import open_model

    torch.set_num_threads(1)
    files = open_model(spec.model)
    compiler = _constraint_compiler(files)
    if spec.kind == "deepseek_v41":
        from rackserve.model.deepseek_v41.runner import DeepseekV41Runner

        if spec.synthetic_acceptance:
            log.warning(
                "synthetic acceptance of %g tokens a step: this measures speed alone, the output is not the model's",
                spec.synthetic_acceptance,
            )
        engine = DeepseekV41Runner(
            files,
            arena,
            num_blocks,
            spec.block_tokens,
            spec.options,
            collectives,
            compiler,
            kernels=spec.kernels,
            threads=threads,
            cores=cores,
        )
        log.info("the model is computed by %s", engine.path)
        return engine
    if collectives is not None and collectives.share.tp_size > 1:
        raise ConfigError("runner.kind llama cannot be split over devices: set topology.prefill_tp and topology.decode_tp to 1")
    from rackserve.model.products import TILE_ROWS
    from rackserve.model.runner import LlamaRunner

    runner = LlamaRunner(
        files,
        arena,
        num_blocks,
        spec.block_tokens,
        dtype=spec.dtype,
        compile_constraint=compiler,
        kernels=spec.kernels,
        threads=threads,
        cores=cores,
    )
    log.info("the model is computed by %s", runner.path)
    if runner.products != "direct":
        how = f"in tiles of {TILE_ROWS} rows" if runner.products == "tiled" else "row by row"
        log.warning("matrix products on this CPU round by the number of rows; computing %s, so that answers do not change", how)
    return runner
