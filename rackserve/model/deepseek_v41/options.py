"""What an operator may choose about a DeepSeek-V4.1 engine. No tensor is touched, so this needs no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.ranges import MAX_COUNT, require_range
from rackserve.model.deepseek_v41.layout import ResumeMode

WeightMemory = Literal["widened", "stored"]

DraftPolicy = Literal["all", "adaptive"]

MAX_STEP_TOKENS = 1024
MAX_SHARDS = 4096


class RunnerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one device computes.

    resume                how a cached prefix is continued: "exact" (state is stored and restored), "bounded_replay" (the last
                          positions are computed again; approximate) or "decoder_replay" (that, and a prompt's early positions
                          pass the first half of the layers alone; approximate)
    weights               "widened": matrices are kept in float32; "stored": as in the checkpoint, widened for each product
    activation_rounding   round the inputs of fp8 and fp4 products to fp8, as the served checkpoint does
    draft_policy          which drafts are verified: a name from `rackserve.sched.draft_budget.POLICIES`
    synthetic_acceptance  0: drafts are verified. Else tokens per step, at least 1: so many are taken whatever the model says.
                          A run with it measures speed alone; its output is not the model's
    engram_owners         who has the rows of the Engram tables, which are cut into as many shards: for each "" (mapped from the
                          checkpoint here) or the address of a `rackserve serve-rows`
    engram_hot_rows       rows of each Engram table kept near; they pay where owners are on other machines
    """

    resume: ResumeMode = "exact"
    weights: WeightMemory = "widened"
    activation_rounding: bool = False
    draft_policy: DraftPolicy = "all"
    synthetic_acceptance: float = 0.0
    engram_owners: tuple[str, ...] = ("",)
    engram_hot_rows: int = 0

    def __post_init__(self) -> None:
        require_range("runner", self, ("engram_hot_rows",), 0, MAX_COUNT)
        if not 1 <= len(self.engram_owners) <= MAX_SHARDS:
            raise ConfigError(
                f"runner.engram_owners must name the owners of 1 to {MAX_SHARDS} shards, got {len(self.engram_owners)}; "
                'as name "" stands for this process'
            )
        require_range("runner", self, ("synthetic_acceptance",), 0, MAX_STEP_TOKENS)
        if 0 < self.synthetic_acceptance < 1:
            raise ConfigError(
                f"runner.synthetic_acceptance is {self.synthetic_acceptance}: a step yields at least 1 token; 0 turns it off"
            )
