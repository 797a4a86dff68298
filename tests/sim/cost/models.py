"""Set-ups that several tests of the cost model share."""

from __future__ import annotations

import msgspec

from rackserve.architectures import FLASH, architecture_named
from rackserve.base.topology import Role
from rackserve.sim.cost.architecture import Architecture, Attention, Segment, Weights
from rackserve.sim.cost.kernels import Kernels, kernel_sets
from rackserve.sim.cost.load import StepLoad, prefill_load
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.hardware import Chip, Value, chips

CHUNK = 8192
TAIL = 128
DUMMY = StepLoad()

PLAIN = Architecture(
    name="plain",
    source="made up",
    math="bf16",
    hidden_size=10,
    segments=(Segment(name="layers", num_layers=2, dense=Weights(500, 800), attention=(Attention(2, 4, 4, 1),), products=3),),
    head=Weights(50, 100),
    embedding=Weights(50, 100),
    kv_bytes=8,
)
"""Two layers in 800 bytes, 200 bytes of vocabulary, 8 bytes per cached token."""


def known(number: float) -> Value:
    return Value(number, "assumed", "made up")


def with_chip(**numbers: float) -> Chip:
    """GB300 with other numbers."""
    return msgspec.structs.replace(chips()["gb300"], **{name: known(value) for name, value in numbers.items()})


def with_kernels(name: str, **numbers: float) -> Kernels:
    return msgspec.structs.replace(kernel_sets()[name], **{field: known(value) for field, value in numbers.items()})


def flash(chip: str, role: Role, tp: int = 1, ep: int = 1, kernels: str = "", table_shards: int = 0) -> StepModel:
    """DeepSeek-V4.1-Flash on `ep` ranks of `tp` chips."""
    found = chips()[chip]
    setup = Setup(
        architecture=architecture_named(FLASH),
        chip=found,
        kernels=kernel_sets()[kernels or found.kernels],
        role=role,
        tp=tp,
        ep=ep,
        table_shards=table_shards,
    )
    return StepModel(setup)


def prompt_s(model: StepModel, tokens: int, *, replay: bool = True) -> float:
    """Seconds of one prompt's chunks on the first rank of a group whose others are idle."""
    idle = [DUMMY] * (model.setup.ep - 1)
    total = 0.0
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        tail = min(TAIL, count) if start + count == tokens else 0
        total += model.seconds([prefill_load(count, start, tail if replay else None), *idle])
    return total
