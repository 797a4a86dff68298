"""One rank's cache and scheduler, without engine or node."""

from __future__ import annotations

from array import array
from typing import Any

from msgspec import structs

from rackserve.base.ids import Rank
from rackserve.base.keys import extend_chain
from rackserve.base.kv_layout import KvLayout
from rackserve.base.request import Placement, Request
from rackserve.base.step import ItemResult, Step, StepResult
from rackserve.base.units import blocks_for
from rackserve.digest_model import digest_layout
from rackserve.kv.rank_cache import RankCache
from rackserve.sched.scheduler import Progress, Scheduler, SchedulerConfig
from rackserve.sched.sequence import Sequence, new_sequence

RANK = Rank("worker0")
BLOCK = 4


def sequence_of(number: int, num_tokens: int, max_tokens: int = 4, *, stop: tuple[int, ...] = ()) -> Sequence:
    """A sequence in state `queued` whose tokens name it."""
    tokens = array("i", [number * 100 + index for index in range(num_tokens)]).tobytes()
    chain = extend_chain(b"", b"r" * 16, tokens, BLOCK)
    request = Request(f"r{number}", "s", tokens, chain, num_tokens, max_tokens, stop_token_ids=stop, root=b"r" * 16)
    return new_sequence(number, request, Placement(request.id, 1, RANK, RANK, 0, 0), "queued", max_tokens)


def nameless(number: int, desk: Desk, num_tokens: int = 5, max_tokens: int = 8) -> Sequence:
    """A sequence on `desk` that has drawn its first token, of a request without token ids."""
    named = sequence_of(number, num_tokens, max_tokens)
    request = structs.replace(named.request, tokens=b"")
    sequence = new_sequence(number, request, named.placement, "queued", max_tokens)
    sequence.computed = sequence.scheduled = num_tokens
    sequence.outputs.append(1)
    return desk.add(sequence, num_tokens)


class Desk:
    """A scheduler whose sequences get their blocks when they are added."""

    def __init__(self, num_blocks: int = 64, *, window: bool = False, model: KvLayout | None = None, **config: Any) -> None:
        self.config = SchedulerConfig(**({"max_batched_tokens": 8} | config))
        layout = model or digest_layout(BLOCK, window=window)
        self.cache = RankCache(RANK, layout, num_blocks, 32 if layout.has_window else 0)
        self.scheduler = Scheduler(self.config, RANK, self.cache, BLOCK)

    def add(self, sequence: Sequence, num_tokens: int = 0) -> Sequence:
        sequence.lease = self.cache.acquire(b"", 0, blocks_for(num_tokens or len(sequence.tokens), BLOCK))
        assert sequence.lease is not None
        if self.cache.layout.has_window:
            slots = [self.cache.allocate_window(sequence.lease) for _ in range(2)]
            sequence.end_slot, boundary_slot = (slot if slot is not None else -1 for slot in slots)
            sequence.boundary_slot = boundary_slot if self.cache.layout.stores_state else -1
        sequence.move("ready")
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> Step | None:
        step, _ = self.scheduler.plan()
        self.scheduler.check()
        return step

    def finish(self, step: Step, token: int = 7, num_accepted: int = 1) -> list[Progress]:
        """The step's results: `token`, as often as asked for, for each item that samples."""
        return self.finish_with(step, [token] * num_accepted)

    def finish_with(self, step: Step, tokens: list[int]) -> list[Progress]:
        """The step's results: the first of `tokens`, as many as asked for, for each item that samples."""
        items = tuple(
            ItemResult(item.sequence, tuple(tokens[: item.num_draft + 1]) if item.sample else (), num_verified=item.num_draft)
            for item in step.items
        )
        progress, _ = self.scheduler.apply(step, StepResult(0, items))
        self.scheduler.check()
        return progress
