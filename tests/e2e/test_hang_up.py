"""Clients hang up at every stage: what ran for them ends at once, and the rack is as free as before."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rackserve.base.rng import draw_below
from tests.e2e.rig import Rack, cold, complete, is_idle, metric, prompt, serve, stream, until

LONG = 5_000
RECEIVED = "requests_received_total"
ABORTED = 'requests_total{outcome="aborted"}'


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory, digest: list[str]) -> Iterator[Rack]:
    """One prefill and one decode rank that take one request at a time, so that the second one queues."""
    small = ["topology.prefill_workers=1", "scheduler.max_sequences=1", "scheduler.max_batched_tokens=16"]
    options = [part for setting in small for part in ("--set", setting)]
    with serve(tmp_path_factory.mktemp("hang_up"), *digest, *options) as running:
        yield running


async def arrivals(client: httpx.AsyncClient, count: float) -> None:
    """Wait until the rack has received `count` requests."""

    async def all_in() -> bool:
        return await metric(client, RECEIVED) >= count

    await until(all_in, 5, f"{count:g} requests arrived")


async def hang_up(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def expect_calm(client: httpx.AsyncClient, aborted: float) -> None:
    """Everything is free within seconds, the abort was counted once each, and the next request is served."""
    await until(lambda: is_idle(client), 3, "nothing runs any more")
    assert await metric(client, ABORTED) == aborted
    ids = prompt("afterwards", 40)
    assert (await complete(client, ids, 3)).tokens == cold(ids, 3)
    await until(lambda: is_idle(client), 3, "idle")


def test_a_client_that_leaves_while_streaming_frees_everything(rack: Rack) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        before, begun = await metric(client, ABORTED), asyncio.Event()
        task = asyncio.ensure_future(stream(client, prompt("streaming", 50), LONG, lambda count: begun.set()))
        await begun.wait()
        await hang_up(task)
        await expect_calm(client, before + 1)

    rack.run(work)


def test_a_client_that_leaves_a_plain_call_frees_everything(rack: Rack) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        before = await metric(client, ABORTED)
        task = asyncio.ensure_future(complete(client, prompt("plain", 50), LONG))
        await until(lambda: metric(client, 'requests_running{rank="decode0.0"}'), 5, "it runs")
        await hang_up(task)
        await expect_calm(client, before + 1)

    rack.run(work)


def test_a_client_that_leaves_during_prefill_frees_everything(rack: Rack) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        before = await metric(client, ABORTED)
        task = asyncio.ensure_future(stream(client, prompt("prefill", 7_000), 20))
        await until(lambda: metric(client, 'requests_running{rank="prefill0.0"}'), 5, "its prefill runs")
        await hang_up(task)
        assert await metric(client, 'requests_running{rank="decode0.0"}') == 0
        await expect_calm(client, before + 1)

    rack.run(work)


@pytest.mark.parametrize("ask", [stream, complete])
def test_clients_that_leave_while_queued_free_everything(rack: Rack, ask: object) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        before, received = await metric(client, ABORTED), await metric(client, RECEIVED)
        first = asyncio.ensure_future(stream(client, prompt("running", 6_000), LONG))
        await until(lambda: metric(client, "requests_running"), 5, "one runs")
        others = [asyncio.ensure_future(ask(client, prompt(f"queued {number}", 300), 50)) for number in range(3)]  # type: ignore[operator]
        await arrivals(client, received + 4)
        await until(lambda: metric(client, "requests_queued"), 5, "the others queue")
        for task in (*others, first):
            await hang_up(task)
        await expect_calm(client, before + 4)

    rack.run(work)


def test_twenty_hang_ups_in_a_row_leave_a_rack_that_serves(rack: Rack) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        before = await metric(client, RECEIVED)
        for number in range(20):
            task = asyncio.ensure_future((stream, complete)[number % 2](client, prompt(f"drop {number}", 400), LONG))
            await arrivals(client, before + number + 1)
            await hang_up(task)
        await until(lambda: is_idle(client), 3, "nothing runs any more")
        ids = prompt("after twenty", 900)
        assert (await complete(client, ids, 40)).tokens == cold(ids, 40)

    rack.run(work)


REQUESTS = 150
HOLDERS = ("prefill0.0", "prefill1.0", "decode0.0", "pool.0")


def descriptors(pids: list[int]) -> list[int]:
    """How many files each process has open, besides memory, which is mapped when it is first touched."""
    open_files = [[os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()] for pid in pids]
    return [sum(not file.startswith("/memfd:") for file in files) for files in open_files]


def test_many_calls_of_which_a_third_is_left_leave_every_count_where_it_was(tmp_path: Path, digest: list[str]) -> None:
    """Streamed and not, at any moment from the first byte of the request on; what stays is what the caches keep on purpose."""

    async def load(rack: Rack, first: int, number: int) -> list[bool]:
        """Whether each of the calls ran to its end; the connections are closed after it."""
        places = asyncio.Semaphore(16)

        async def call(name: int) -> bool:
            ids = prompt(f"shared {name % 20}", 200) + prompt(f"own {name}", 30 + draw_below(400, "length", name))
            outputs = 10 + draw_below(50, "outputs", name)
            async with places:
                task = asyncio.ensure_future((stream, complete)[name % 2](client, ids, outputs))
                if name % 3:
                    answer = await task
                    assert answer.tokens == cold(ids, outputs), answer.message
                    return True
                await asyncio.wait((task,), timeout=draw_below(120, "leave", name) / 1000)
                left = not task.done()
                await hang_up(task)
                return not left

        async with rack.client() as client:
            return await asyncio.gather(*(call(name) for name in range(first, first + number)))

    async def work(client: httpx.AsyncClient) -> None:
        health = (await client.get("/health")).json()
        pids = [rack.command.process.pid, *(rank["pid"] for rank in health["ranks"])]

        async def calm() -> bool:
            used = [await metric(client, f'kv_blocks{{holder="{holder}",state="used"}}') for holder in HOLDERS]
            return not any(used) and await is_idle(client)

        async def as_before() -> bool:
            return await calm() and descriptors(pids) == open_before

        await load(rack, 0, 30)
        await until(calm, 10, "nothing is held")
        open_before = descriptors(pids)
        ended = await load(rack, 30, REQUESTS)
        assert ended.count(False) > REQUESTS // 6, "many are left before their end"
        await until(as_before, 10, "every block is free or cached, and every file is closed")
        for reason in ("expired_leases", "expired_grants"):
            assert await metric(client, f"pool_{reason}_total") == 0, "given back, not timed out"
        assert await metric(client, ABORTED) <= ended.count(False) + 10

    with serve(tmp_path, *digest) as rack:
        rack.run(work)
