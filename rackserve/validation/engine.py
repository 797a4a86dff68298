"""One engine that mixes prompts and decode: the production scheduler over the production cache, a pass at a time."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.ids import Rank
from rackserve.base.keys import Chain, count, prefix
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.request import Placement, Request
from rackserve.base.step import UNNAMED_TOKEN, ItemResult, Step, StepResult
from rackserve.base.units import blocks_for
from rackserve.kv.rank_cache import RankCache
from rackserve.sched.scheduler import Scheduler, SchedulerConfig
from rackserve.sched.sequence import Sequence, new_sequence


class Ask(msgspec.Struct, frozen=True):
    """A request: its prompt, by the keys of its full blocks, and how many tokens it will be answered with."""

    number: int
    session: str
    chain: Chain
    prompt_tokens: int
    output_tokens: int


class BatchTime(Protocol):
    """Seconds of one forward pass."""

    def seconds(self, step: Step) -> float: ...


class Limits(msgspec.Struct, frozen=True):
    """Of one engine: KV blocks, sequences in its batch and tokens of a pass."""

    num_blocks: int
    max_sequences: int
    max_batched_tokens: int
    block_tokens: int = 16


class Engine:
    """Requests wait in order for a place in the batch and room for all their tokens; cached prefixes are not computed.

    cached   of each request, tokens found when it was admitted
    """

    __slots__ = ("_block", "_limits", "_running", "_scheduler", "_time", "_waiting", "cache", "cached", "name", "step")

    def __init__(self, name: str, limits: Limits, time: BatchTime) -> None:
        self.name = Rank(name)
        self.cache = RankCache(self.name, KvLayout(limits.block_tokens, (KvGroup("kv", "full", 1),)), limits.num_blocks)
        config = SchedulerConfig(
            max_batched_tokens=max(limits.max_batched_tokens, limits.max_sequences),
            max_sequences=limits.max_sequences,
            max_steps_in_flight=1,
            carry=True,
        )
        self._scheduler = Scheduler(config, self.name, self.cache, limits.block_tokens)
        self._block = limits.block_tokens
        self._limits = limits
        self._time = time
        self._running: dict[int, Sequence] = {}
        self._waiting: deque[tuple[Ask, int]] = deque()
        self.cached: dict[int, int] = {}
        self.step: Step | None = None

    @property
    def load(self) -> int:
        """Requests running or waiting."""
        return len(self._running) + len(self._waiting)

    def held(self, ask: Ask) -> int:
        """Tokens of the prompt that are cached."""
        return self.cache.present(ask.chain, (ask.prompt_tokens - 1) // self._block) * self._block

    def add(self, ask: Ask, brought_tokens: int = 0) -> None:
        """Queue a request, whose first `brought_tokens` came from elsewhere. ConfigError if it could never run."""
        if blocks_for(ask.prompt_tokens + ask.output_tokens, self._block) > self._limits.num_blocks:
            raise ConfigError(
                f"a request of {ask.prompt_tokens} tokens does not fit {self._limits.num_blocks} blocks; give more"
            )
        self._waiting.append((ask, brought_tokens))

    def begin(self) -> float | None:
        """Start a pass if there is work; how long it takes."""
        self._admit()
        self.step, _ = self._scheduler.plan()
        return None if self.step is None else self._time.seconds(self.step)

    def end(self) -> tuple[list[int], list[int]]:
        """The pass is over: numbers of the requests that got their first token, and of those that got their last."""
        step = self.step
        assert step is not None
        self.step = None
        touched = [self._running[item.sequence] for item in step.items]
        firsts = [each.number for each, item in zip(touched, step.items, strict=True) if item.sample and not each.outputs]
        items = tuple(ItemResult(item.sequence, (UNNAMED_TOKEN,) if item.sample else ()) for item in step.items)
        progress, _ = self._scheduler.apply(step, StepResult(step.dp_rank, items, 1, 1))
        self._scheduler.reports.clear()
        self._scheduler.started.clear()
        for sequence in touched:
            self._commit(sequence)
        touched += [part.sequence for part in progress if part.sequence not in touched]
        lasts = [each.number for each in touched if len(each.outputs) >= each.max_outputs]
        for number in lasts:
            self._leave(self._running.pop(number))
        return firsts, lasts

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits.max_sequences:
            ask, brought = self._waiting[0]
            total = blocks_for(ask.prompt_tokens + ask.output_tokens, self._block)
            most = (ask.prompt_tokens - 1) // self._block
            matched = self.cache.match(ask.chain, most)
            lease = self.cache.acquire(ask.chain, matched, total - matched)
            if lease is None:
                return
            self._waiting.popleft()
            known = max(matched, min(brought // self._block, most, count(ask.chain)))
            self.cache.commit(lease, prefix(ask.chain, known), known)
            request = Request(
                str(ask.number), ask.session, b"", ask.chain, ask.prompt_tokens, ask.output_tokens, ignore_eos=True
            )
            placement = Placement(request.id, 1, self.name, self.name, 0, 0)
            sequence = new_sequence(ask.number, request, placement, "queued", ask.output_tokens)
            sequence.lease = lease
            sequence.computed = sequence.scheduled = known * self._block
            sequence.move("ready")
            self.cached[ask.number] = known * self._block
            self._running[ask.number] = sequence
            self._scheduler.add(sequence)

    def _commit(self, sequence: Sequence) -> None:
        """Full blocks of the prompt that are computed are there for others."""
        if sequence.lease is not None:
            done = min(sequence.computed // self._block, count(sequence.chain))
            self.cache.commit(sequence.lease, prefix(sequence.chain, done), done)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        if sequence.state == "ready":
            sequence.move("running")
        sequence.move("done")
        self._scheduler.remove(sequence)
        self.cache.release(sequence.lease)
        self.cache.take_events()
