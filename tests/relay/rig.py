"""A router before stub workers, all on this machine and in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import httpx

from rackserve.api.server import listen, serve
from rackserve.relay.config import PairForm, Retries, RouteConfig, Waits, WorkerConfig, WorkerRole
from rackserve.relay.door import Door
from rackserve.relay.http import create_app
from rackserve.relay.relay import Relay
from tests.relay.stub import StubWorker

PROMPT = " ".join(map(str, range(400)))
WAITS = Waits(queue=5, head=5, gap=5, total=20, probe=0.05, grace=5)


class Rig:
    """`relay` before `workers`; `client` speaks to it."""

    def __init__(self, relay: Relay, workers: Sequence[StubWorker], client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        self.relay = relay
        self.workers = workers
        self.client = client
        self.stop = stop
        self.serving: asyncio.Task[None]

    async def post(self, body: dict[str, object], path: str = "/v1/completions", **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json={"model": "m", **body}, headers=named)

    def worker(self, name: str) -> StubWorker:
        return next(worker for worker in self.workers if worker.name == name)

    async def quiet(self) -> None:
        """Nothing is under way any more, anywhere."""
        await until(lambda: not self.relay.num_open and not any(worker.num_open for worker in self.workers))
        await until(lambda: self.relay.placer.is_quiet)
        self.relay.placer.check()
        assert all(worker.in_flight == 0 for worker in self.relay.fleet.workers)
        assert len(self.relay.line) == 0

    def count(self, name: str, *labels: str) -> float:
        """A counter of the router."""
        metric = getattr(self.relay.metrics, name)
        return float((metric.labels(*labels) if labels else metric)._value.get())


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Return once `condition` holds."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def routing(
    num_workers: int = 2,
    *,
    roles: Sequence[WorkerRole] = (),
    pairs: PairForm = "vllm",
    dp_ranks: Sequence[int] = (),
    waits: Waits = WAITS,
    retries: Retries | None = None,
    change: Callable[[RouteConfig], RouteConfig] = lambda config: config,
    workers: Sequence[StubWorker] = (),
    events: Callable[[StubWorker], dict[str, str]] = lambda worker: {},
    tokenizer: str = "",
    door: Door | None = None,
) -> AsyncIterator[Rig]:
    """A router that has looked at its workers and is ready."""
    stubs = list(workers) or [StubWorker() for _ in range(len(roles) or num_workers)]
    for stub in stubs:
        await stub.start()
    made = [
        WorkerConfig(
            stub.url,
            roles[number] if roles else "whole",
            dp_ranks=dp_ranks[number] if dp_ranks else 1,
            **events(stub),
        )
        for number, stub in enumerate(stubs)
    ]
    config = RouteConfig(
        workers=tuple(made), pairs=pairs, waits=waits, retries=retries or Retries(), block_tokens=4, tokenizer=tokenizer
    )
    relay = Relay(change(config), door)
    listener, stop = listen("127.0.0.1", 0), asyncio.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
        rig = Rig(relay, stubs, client, stop)
        grace = relay.config.waits.grace
        rig.serving = asyncio.create_task(
            serve(create_app(relay), listener, gateway=relay, state=relay, stop=stop, grace_s=grace)
        )
        try:
            await until(lambda: relay.is_ready)
            yield rig
        finally:
            stop.set()
            await rig.serving
            for stub in stubs:
                await stub.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run an asynchronous test, with a limit."""

    async def limited() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(limited())
