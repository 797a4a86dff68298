"""What all requests share: who may be chosen, what is booked, what is counted."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import msgspec
from starlette.datastructures import Headers

from rackserve.api.call import Caller
from rackserve.api.errors import failure
from rackserve.api.keys import salt_of
from rackserve.base.errors import RequestError
from rackserve.relay.breaker import RetryBudget
from rackserve.relay.config import RouteConfig
from rackserve.relay.door import Door
from rackserve.relay.feed import EventFeed
from rackserve.relay.ledger import BlockLedger
from rackserve.relay.metrics import RelayMetrics
from rackserve.relay.placer import Booking, Placer
from rackserve.relay.prompts import Call, PromptReader, fields_of
from rackserve.relay.rendering import DIALECTS, Rendering
from rackserve.relay.upstream import Upstream
from rackserve.relay.usage import Usage
from rackserve.relay.waiting import WaitingLine
from rackserve.relay.workers import Fleet, Worker
from rackserve.route.limits import Refusal

_log = logging.getLogger("rackserve.route")

DOUBT_TOKENS = 100_000
"""Prompt tokens of a worker after which its predictions are judged."""


class Relay:
    """The router's state, in one event loop.

    feeds    by worker, one for each of its sockets of KV events
    answers  those under way
    closed   why there are no more, once the router ends
    """

    def __init__(self, config: RouteConfig, door: Door | None = None) -> None:
        """Without a `door` nobody is asked for a key. Raises FileFormatError naming what lacks in the tokenizer's folder."""
        self.config = config
        self.door = door or Door()
        self.fleet = Fleet(config)
        self.placer = Placer(config)
        self.upstream = Upstream()
        rendering = Rendering(config.tokenizer, trust_template=config.trust_template) if config.tokenizer else None
        self.reader = PromptReader(config.key_tokens, rendering)
        self.line = WaitingLine(config.queued, config.waits.queue, self.release)
        self.budget = RetryBudget(config.retries.budget)
        self.metrics = RelayMetrics((worker.name for worker in self.fleet.workers), self._gauges)
        self.draining = False
        self.closed = ""
        self.answers: set[asyncio.Task[str]] = set()
        self.num_open = 0
        self.ledgers: dict[str, dict[int, BlockLedger]] = {}
        self.feeds: dict[str, list[EventFeed]] = {}
        for worker in config.workers:
            if worker.events and worker.role != "decode":
                ledgers = {rank.dp_rank: BlockLedger(rank, config.key_tokens, self.reader.adapters) for rank in worker.ranks}
                self.ledgers[worker.name] = ledgers
                self.feeds[worker.name] = [EventFeed(self.placer.index, ledgers, rank) for rank in ledgers]
        self._judged: dict[str, list[int]] = {worker.name: [0, 0, 0] for worker in self.fleet.workers}
        self._untold: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(2, "route") if self.reader.is_slow else None
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------ from arrival to end

    def arrive(self) -> None:
        """A request has come. Raises RequestError (503) while draining."""
        if self.draining:
            raise failure("draining", "the router is shutting down")
        self.num_open += 1
        self._idle.clear()
        self.budget.earn()

    def depart(self) -> None:
        """A request that came has ended."""
        self.num_open -= 1
        if not self.num_open:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def close(self, detail: str) -> None:
        """End every open answer with an error that says `detail`, and refuse later ones."""
        self.draining, self.closed = True, detail
        for answer in self.answers:
            answer.cancel()

    @property
    def is_ready(self) -> bool:
        """Whether work is taken: not draining, and of each role some worker is up."""
        roles = {worker.config.role for worker in self.fleet.workers}
        return not self.draining and roles == {worker.config.role for worker in self.fleet.workers if worker.up}

    def salted(self, path: str, raw: bytes, caller: Caller) -> bytes:
        """The body, with a cache salt of the caller's tenant if it has one. Raises RequestError (400) if it is no object, or if
        the salt that it asks for is no text.
        """
        if not caller.tenant or path not in DIALECTS:
            return raw
        fields = fields_of(raw)
        try:
            asked = msgspec.json.decode(fields.get("cache_salt", b"null"), type=str | None) or ""
        except msgspec.MsgspecError as error:
            raise RequestError(f"cache_salt: {error}", param="cache_salt", code="invalid_type") from error
        fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt_of(self.door.secret, caller.tenant, asked)))
        return msgspec.json.encode(fields)

    async def read(self, path: str, raw: bytes, headers: Headers) -> Call:
        """What the body asks for of `path`. Raises RequestError: 400 if it is no object, 404 if no worker serves its model."""
        if self._threads is None:
            call = self.reader.read(path, raw, headers)
        else:
            call = await asyncio.get_running_loop().run_in_executor(self._threads, self.reader.read, path, raw, headers)
        if not self.fleet.knows(call.model):
            known = ", ".join(list(self.fleet.models())[:20])
            text = f"no worker serves the model {call.model[:200]!r}; there are: {known}"
            raise RequestError(text, param="model", code="model_not_found", status=404)
        return call

    async def place(self, call: Call, without: Collection[str], dp_rank: int | None) -> Booking:
        """A place for `call`, not on workers `without` if there are others. Raises RequestError as `WaitingLine.enter`."""
        if dp_rank is not None and all(dp_rank >= worker.config.dp_ranks for worker in self.fleet.workers):
            text = f"x-data-parallel-rank is {dp_rank}, but no worker has so many ranks"
            raise RequestError(text, param="x-data-parallel-rank")
        loop, pairs = asyncio.get_running_loop(), self.config.has_pairs

        def place() -> Booking | Refusal:
            now = loop.time()
            ranks = self.fleet.ranks("prefill" if pairs else "whole", call.model, now, without=without, dp_rank=dp_rank)
            decode = self.fleet.ranks("decode", call.model, now, without=without) if pairs else None
            found = self.placer.place(call, ranks, decode)
            if isinstance(found, Booking):
                self._took(found)
            return found

        return await self.line.enter(call.model, place)

    def _took(self, booking: Booking) -> None:
        for rank in (booking.rank, booking.decode):
            if rank is not None:
                self.fleet.worker_of(rank).enter()

    def move_decode(self, booking: Booking, without: Collection[str]) -> bool:
        """Let a decode worker other than those `without` take over; False if there is none."""
        old, now = booking.decode, asyncio.get_running_loop().time()
        ranks = self.fleet.ranks("decode", booking.call.model, now, without=without)
        if old is None or not self.placer.move_decode(booking, [rank for rank in ranks if rank.worker not in without]):
            return False
        assert booking.decode is not None
        self.fleet.worker_of(old).leave()
        self.fleet.worker_of(booking.decode).enter()
        return True

    def computed(self, booking: Booking) -> None:
        """The prompt of `booking` is computed."""
        self.placer.computed(booking, self.now_ms())
        self.line.wake()

    def release(self, booking: Booking) -> None:
        """`booking` has ended, however; only the first time counts."""
        if not self.placer.end(booking):
            return
        for rank in (booking.rank, booking.decode):
            if rank is not None:
                self.fleet.worker_of(rank).leave()
        self.line.wake()

    def told(self, booking: Booking, usage: Usage | None) -> None:
        """The answer ended and told `usage`."""
        if usage is None:
            return
        self.placer.learn(booking, usage, self.now_ms())
        name = booking.rank.worker
        share = booking.claimed / max(1, booking.call.tokens)
        predicted = round(share * usage.prompt_tokens)
        self.metrics.prompt.labels(name).inc(usage.prompt_tokens)
        self.metrics.cached.labels(name).inc(usage.cached_tokens)
        self.metrics.predicted.labels(name).inc(predicted)
        self._judge(name, usage, predicted)

    def _judge(self, name: str, usage: Usage, predicted: int) -> None:
        """Say once in a while that a worker's cache is not what is believed of it."""
        sums = self._judged[name]
        for place, value in enumerate((usage.prompt_tokens, usage.cached_tokens, predicted)):
            sums[place] += value
        prompt, cached, expected = sums
        if prompt < DOUBT_TOKENS:
            return
        if abs(cached - expected) > prompt // 4:
            _log.warning(
                "%s: %.0f %% of its prompt tokens were cached, %.0f %% were predicted; are tokenizer, template and block size "
                "those of the worker?",
                name,
                100 * cached / prompt,
                100 * expected / prompt,
            )
        self._judged[name] = [0, 0, 0]

    # ------------------------------------------------------------ workers

    def failed(self, name: str, kind: str, *, dead: bool, counts: bool) -> None:
        """A try failed on worker `name`. `dead`: nobody answered there, so it is not chosen until it is seen again.
        `counts`: the failure speaks against the worker.
        """
        worker = self.fleet.by_name(name)
        self.metrics.failures.labels(name, kind).inc()
        if counts:
            worker.breaker.failed(asyncio.get_running_loop().time())
        if dead:
            self.lose(worker)

    def lose(self, worker: Worker) -> None:
        """`worker` does not answer: nobody is sent there, and what it held is forgotten."""
        if worker.up:
            _log.warning("%s does not answer", worker.name)
        worker.go_down()
        for rank in worker.config.ranks:
            self.placer.forget(rank)
        for feed in self.feeds.get(worker.name, ()):
            feed.restart()
        self.line.wake()

    def find(self, worker: Worker) -> None:
        """`worker` answers."""
        if not worker.up:
            _log.info("%s is up", worker.name)
            worker.up = True
            self.line.wake()

    def now_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1000)

    def _gauges(self) -> dict[str, dict[str, float]]:
        self.metrics.waiting.set(len(self.line))
        for reason, number in list(self.reader.fallbacks.items()):
            self.metrics.untold.labels(reason).inc(number - self._untold[reason])
            self._untold[reason] = number
        out: dict[str, dict[str, float]] = {}
        for worker in self.fleet.workers:
            feeds, ledgers = self.feeds.get(worker.name, []), self.ledgers.get(worker.name, {})
            values = {
                "worker_up": worker.up,
                "worker_circuit_open": worker.breaker.state != "closed",
                "worker_in_flight": worker.in_flight,
                "worker_booked_tokens": sum(map(self.placer.load.outstanding, worker.config.ranks)),
                "worker_event_gaps": sum(feed.num_gaps for feed in feeds),
                "worker_event_restarts": sum(feed.num_restarts for feed in feeds),
                "worker_events_unread": sum(feed.num_unread for feed in feeds),
                "worker_blocks_unplaced": sum(ledger.num_unplaced for ledger in ledgers.values()),
            }
            for name, value in values.items():
                out.setdefault(name, {})[worker.name] = value
        return out

    async def aclose(self) -> None:
        """Close connections and threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        await self.upstream.aclose()
