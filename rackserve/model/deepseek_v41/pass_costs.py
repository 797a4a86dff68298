"""What drafting and verifying cost on this device, measured before the first step, for policies that weigh them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rackserve.base.request import SamplingParams
from rackserve.model.deepseek_v41.backbone import EngramRows, Layers
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.dspark import DraftHead, Drafting
from rackserve.model.deepseek_v41.spans import Span
from rackserve.model.deepseek_v41.state import SequenceState
from rackserve.model.parallel import Collectives
from rackserve.sched.draft_budget import CostTable, DraftCosts, fit_costs

TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 3


class _ZeroRows:
    """Engram rows that are all zero: reading them costs no compute, and the real ones are read beside it."""

    def __init__(self, config: DeepseekV41Config, count: int) -> None:
        self._rows = torch.zeros(count, config.engram_columns * config.engram_head_dim)

    def rows(self, layer: int) -> torch.Tensor:
        return self._rows


@torch.inference_mode()
def measure_costs(config: DeepseekV41Config, backbone: Layers, dspark: DraftHead, collectives: Collectives) -> DraftCosts:
    """Seconds of passes over TOKEN_COUNTS tokens of as many sequences, the same on every device of the group.

    Writes to block 0 of the arena, so it must come before the first step. All devices of the group must call it.
    """

    def state() -> SequenceState:
        fresh = SequenceState(config)
        fresh.blocks = [0]
        fresh.begin(1, [])
        return fresh

    def verify(count: int) -> Callable[[], object]:
        spans = [Span(state(), 1, 1, first) for first in range(count)]
        engram: EngramRows = _ZeroRows(config, count)
        return lambda: backbone.logits(backbone.forward([0] * count, spans, engram).hidden)

    def draft(count: int) -> Callable[[], object]:
        requests = [Drafting(state(), 0, SamplingParams(), 0) for _ in range(count)]
        return lambda: dspark.draft(requests)

    return DraftCosts(_table(draft, collectives), _table(verify, collectives))


def _table(prepare: Callable[[int], Callable[[], object]], collectives: Collectives) -> CostTable:
    counts = [count for count in TOKEN_COUNTS for _ in range(ROUNDS)]
    passes = {count: prepare(count) for count in TOKEN_COUNTS}
    passes[TOKEN_COUNTS[0]]()  # the first pass of all also warms the libraries up
    seconds = []
    for count in counts:
        begin = time.perf_counter()
        passes[count]()
        seconds.append(time.perf_counter() - begin)
    return fit_costs(zip(counts, collectives.agree(seconds), strict=True))
