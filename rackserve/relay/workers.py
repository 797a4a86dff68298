"""The workers as the router knows them: up or not, what they serve, whether their circuit is closed, and who waits on them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from rackserve.base.ids import Rank
from rackserve.relay.breaker import Breaker
from rackserve.relay.config import RouteConfig, WorkerConfig, WorkerRole


class Worker:
    """One server. `models`: how many tokens fit each that it serves, 0 if unknown; empty until it has said. `in_flight` counts
    requests it has not ended."""

    __slots__ = ("_waiting", "breaker", "config", "in_flight", "models", "up")

    def __init__(self, config: WorkerConfig, breaker: Breaker) -> None:
        self.config = config
        self.breaker = breaker
        self.up = False
        self.models: Mapping[str, int] = {}
        self.in_flight = 0
        self._waiting: set[asyncio.Timeout] = set()

    @property
    def name(self) -> str:
        return self.config.name

    def serves(self, model: str) -> bool:
        """Whether a request for `model` may go there. A request without one goes anywhere, and so does any request to a worker
        that does not list its models."""
        return not model or not self.models or model in self.models

    def enter(self) -> None:
        """A request was placed there."""
        self.breaker.sent()
        self.in_flight += 1

    def leave(self) -> None:
        """A request that was placed there has ended, however."""
        self.in_flight -= 1
        self.breaker.gave_up()

    def wait(self, limit: asyncio.Timeout) -> None:
        """`limit` bounds a wait for the worker's first byte: it ends at once if the worker goes down."""
        self._waiting.add(limit)

    def unwait(self, limit: asyncio.Timeout) -> None:
        self._waiting.discard(limit)

    def go_down(self) -> None:
        """The worker does not answer any more; waits for it end."""
        self.up = False
        for limit in self._waiting:
            limit.reschedule(asyncio.get_running_loop().time())
        self._waiting.clear()


class Fleet:
    """All workers, by name in the order of their ranks."""

    __slots__ = ("_by_name", "workers")

    def __init__(self, config: RouteConfig) -> None:
        retries = config.retries
        made = (Worker(each, Breaker(retries.failures, retries.window, retries.rest)) for each in config.workers)
        self.workers = tuple(sorted(made, key=lambda worker: worker.name))
        self._by_name = {worker.name: worker for worker in self.workers}

    def worker_of(self, rank: Rank) -> Worker:
        return self._by_name[rank.worker]

    def by_name(self, name: str) -> Worker:
        return self._by_name[name]

    def ranks(
        self, role: WorkerRole, model: str, now: float, *, without: Collection[str] = (), dp_rank: int | None = None
    ) -> list[Rank]:
        """Ranks of `role` a request for `model` may go to now, in order: those not on workers `without`, or on these if on no
        others. `dp_rank`: only ranks of that number.
        """
        fit = [
            worker
            for worker in self.workers
            if worker.config.role == role and worker.up and worker.serves(model) and worker.breaker.allows(now)
        ]
        fresh = [worker for worker in fit if worker.name not in without]
        ranks = [rank for worker in fresh or fit for rank in worker.config.ranks]
        return ranks if dp_rank is None else [rank for rank in ranks if rank.dp_rank == dp_rank]

    def knows(self, model: str) -> bool:
        """Whether some worker, up or not, serves `model` as far as is known."""
        return any(worker.serves(model) for worker in self.workers)

    def models(self) -> dict[str, int]:
        """Everything that workers that are up say they serve, by name; what fits the context of whichever has the least, 0 if
        none tells."""
        found: dict[str, int] = {}
        for worker in self.workers:
            for model, context in worker.models.items() if worker.up else ():
                found[model] = min(filter(None, (context, found.get(model))), default=0)
        return dict(sorted(found.items()))
