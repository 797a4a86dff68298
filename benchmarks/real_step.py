"""The reference engine's real steps, for scripts that compare with them. Needs the engine extra."""

from __future__ import annotations

from array import array
from importlib.util import find_spec
from typing import Literal

from rackserve.base.errors import RackserveError
from rackserve.base.step import Step, StepItem

BLOCK_TOKENS = 16
CONTEXT = 600
CHUNK = 256


def missing() -> str:
    """What the engine lacks on this machine; empty if it can run."""
    if any(find_spec(name) is None for name in ("torch", "gguf", "safetensors")):
        return "the engine extra is not installed (pip install -e '.[engine]')"
    from rackserve.model.files import open_model

    try:
        open_model("embedded")
    except RackserveError as error:
        return str(error)
    return ""


def no_kernels() -> str:
    """Why native steps cannot be had here; empty if they can."""
    from rackserve.kernels.cpu import library

    return "" if library.find() is not None else "no native kernels were built"


class RealEngine:
    """The embedded model on one thread, with room for `batch` sequences of CONTEXT tokens and `extra` more each."""

    def __init__(
        self, batch: int, context: int = CONTEXT, extra: int = 256, kernels: Literal["native", "torch"] = "torch"
    ) -> None:
        from rackserve.model.files import open_model
        from rackserve.model.layout import kv_layout
        from rackserve.model.runner import LlamaRunner

        files = open_model("embedded")
        self.context = context
        self.blocks_each = -(-(context + extra) // BLOCK_TOKENS)
        num_blocks = batch * self.blocks_each
        layout = kv_layout(files.config, BLOCK_TOKENS, "bf16")
        arena = memoryview(bytearray(num_blocks * layout.block_bytes))
        self.runner = LlamaRunner(files, arena, num_blocks, BLOCK_TOKENS, kernels=kernels)
        self._ends: dict[int, int] = {}
        self._retired: tuple[int, ...] = ()

    def prefill(self, sequence: int) -> None:
        """Compute the prompt of `sequence` in chunks; its blocks are the same every time."""
        ids = array("i", (1_000 + (at * 7_919 + sequence * 104_729) % 30_000 for at in range(self.context)))
        table = tuple(range(sequence * self.blocks_each, (sequence + 1) * self.blocks_each))
        for start in range(0, self.context, CHUNK):
            end = min(start + CHUNK, self.context)
            blocks = table if start == 0 else ()
            item = StepItem(sequence, start, end - start, ids[start:end].tobytes(), blocks, end == self.context)
            retired = (sequence,) if start == 0 and sequence in self._ends else ()
            self.runner.run(Step(0, (item,), retired))
        self._ends[sequence] = self.context

    def decode(self, batch: int) -> None:
        """One step in which sequences 0 .. batch - 1 make a token each; at the end of their room they start over."""
        if max(self._ends[number] for number in range(batch)) + 1 >= self.blocks_each * BLOCK_TOKENS:
            for number in range(batch):
                self._ends[number] = self.context
        items = tuple(StepItem(number, self._ends[number], 1, b"", (), True) for number in range(batch))
        self.runner.run(Step(0, items))
        for number in range(batch):
            self._ends[number] += 1
