"""Step times of engines that mix prompts and decode: a decode step, and what the prompts' operators add to it."""

from __future__ import annotations

import msgspec

from rackserve.base.step import Step
from rackserve.base.units import NS_PER_S
from rackserve.sim.cost.architecture import Architecture
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.cost.load import StepLoad, load_of, prefill_load
from rackserve.sim.cost.memory import budget
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.cost.tables import StepTimes
from rackserve.sim.hardware import chips

MAX_ENTRIES = 100_000


class MixedTime:
    """Seconds of the steps of one rank of `tp` chips out of `ep` ranks that have alike work.

    prompt_scale   what is said of prompts is multiplied by it, where a measured rate is given
    """

    __slots__ = ("_decode", "_prefill", "_prompts", "_scale", "architecture", "setup")

    def __init__(
        self, architecture: Architecture, chip_name: str, *, tp: int = 1, ep: int = 1, prompt_scale: float = 1.0
    ) -> None:
        chip = chips()[chip_name]
        kernels = kernel_sets()[chip.kernels]
        self.architecture = architecture
        self._scale = prompt_scale
        self.setup = Setup(architecture=architecture, chip=chip, kernels=kernels, role="decode", tp=tp, ep=ep)
        self._decode = StepTimes(StepModel(self.setup))
        self._prefill = StepModel(msgspec.structs.replace(self.setup, role="prefill"))
        self._prompts: dict[StepLoad, float] = {}

    def seconds(self, step: Step) -> float:
        """Duration of a step: without the base of a prefill step, which is another kind of engine's."""
        decoding = tuple(item for item in step.items if item.num_tokens == 1)
        prompts = tuple(item for item in step.items if item.num_tokens > 1)
        seconds = 0.0
        if decoding or step.carried:
            rest = msgspec.structs.replace(step, items=decoding) if prompts else step
            seconds = self._decode.step_ns(rest) / NS_PER_S
        if prompts:
            seconds += self.prompt_seconds(load_of(Step(step.dp_rank, prompts)))
        return seconds

    def prompt_seconds(self, load: StepLoad) -> float:
        """What prompts with this load add."""
        found = self._prompts.get(load)
        if found is None:
            terms = self._prefill.terms([load])
            found = self._scale * sum(term.seconds for term in terms if term.name != "step base")
            if len(self._prompts) < MAX_ENTRIES:
                self._prompts[load] = found
        return found

    def prompt_rate(self, chunk_tokens: int) -> float:
        """Tokens a second of one prompt that fills a pass by itself."""
        return chunk_tokens / self.prompt_seconds(prefill_load(chunk_tokens))

    def prompt_in_chunks(self, tokens: int, chunk_tokens: int) -> float:
        """Seconds of one prompt alone, in passes of at most `chunk_tokens`."""
        starts = range(0, tokens, chunk_tokens)
        return sum(self.prompt_seconds(prefill_load(min(chunk_tokens, tokens - start), start)) for start in starts)

    def num_blocks(self, block_tokens: int) -> int:
        """KV blocks that a rank's memory has room for: rows with fewer heads than chips are held by all of them."""
        model = self.architecture
        heads = min(kind.kv_heads for segment in model.segments for kind in segment.attention)
        return int(budget(self.setup).left_bytes * min(self.setup.tp, heads) / model.kv_bytes) // block_tokens
