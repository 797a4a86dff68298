"""What runs beside the requests: looks at the workers' health, their KV events, and the ageing of records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import msgspec
import zmq
import zmq.asyncio

from rackserve.live.kv_events import LARGEST_BATCH, NUMBER_BYTES, REPLAY_END
from rackserve.relay.door import WORKER_KEY_VARIABLE
from rackserve.relay.feed import EventFeed
from rackserve.relay.relay import Relay
from rackserve.relay.workers import Worker

_log = logging.getLogger("rackserve.route")

MISSES = 2
"""Looks without an answer after which a worker is down."""

SUBSCRIBED = 100_000
"""Batches that may wait to be read; what comes on top is lost, seen as a gap and asked for again."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def endpoint_of(base: str, dp_rank: int) -> str:
    """Where rank `dp_rank` publishes, given where rank 0 does: so many ports higher."""
    if not dp_rank or not base.startswith("tcp://"):
        return base
    host, _, port = base.rpartition(":")
    return f"{host}:{int(port) + dp_rank}"


@asynccontextmanager
async def watching(relay: Relay) -> AsyncIterator[None]:
    """Watch as long as the block runs. Entered after every worker was looked at once."""
    async with httpx.AsyncClient(timeout=relay.config.waits.probe, headers=relay.door.for_workers, trust_env=False) as client:
        await asyncio.gather(*(_look(relay, client, worker) for worker in relay.fleet.workers))
        for worker in relay.fleet.workers:
            if not worker.up:
                _log.warning("%s does not answer yet; nobody is sent there until it does", worker.name)
        jobs: list[Coroutine[object, object, None]] = [_probe(relay, client, worker) for worker in relay.fleet.workers]
        jobs.append(_age(relay))
        context = zmq.asyncio.Context()
        context.linger = 0
        for worker in relay.fleet.workers:
            for rank, feed in enumerate(relay.feeds.get(worker.name, ())):
                replay = worker.config.replay and endpoint_of(worker.config.replay, rank)
                jobs.append(
                    _subscribe(context, feed, endpoint_of(worker.config.events, rank), replay, relay.config.waits.probe)
                )
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            context.destroy(linger=0)


# ---------------------------------------------------------------- health


async def _look(relay: Relay, client: httpx.AsyncClient, worker: Worker) -> bool:
    """One look at `worker`; whether it answers."""
    try:
        found = await client.get(worker.config.url + "/health")
        if found.status_code == 404:  # not every server has this path
            found = await client.get(worker.config.url + "/v1/models")
        if not found.is_success:
            return False
        if not worker.up or not worker.models:
            worker.models = await _models(client, worker)
    except (httpx.HTTPError, OSError):
        return False
    relay.find(worker)
    return True


async def _models(client: httpx.AsyncClient, worker: Worker) -> dict[str, int]:
    """What `worker` says it serves, and how much fits each; nothing if it does not say, which is told when it comes up."""
    listed = await client.get(worker.config.url + "/v1/models")
    try:
        told = msgspec.json.decode(listed.content, type=_Models).data
        found = {model.id: max(0, model.max_model_len or 0) for model in told}
    except msgspec.MsgspecError:
        found = {}
    if not found and not worker.up:
        status = listed.status_code
        remedy = f"; if it asks for a key, put that into {WORKER_KEY_VARIABLE}" if status in (401, 403) else ""
        _log.warning("%s does not list its models (HTTP %d), so requests for any go there%s", worker.name, status, remedy)
    return found


async def _probe(relay: Relay, client: httpx.AsyncClient, worker: Worker) -> None:
    misses = 0
    while True:
        await asyncio.sleep(relay.config.waits.probe)
        misses = 0 if await _look(relay, client, worker) else misses + 1
        if misses >= MISSES or (misses and not worker.up):
            relay.lose(worker)


async def _age(relay: Relay) -> None:
    while True:
        await asyncio.sleep(min(60.0, relay.config.records.age / 4))
        relay.placer.expire(relay.now_ms())


# ---------------------------------------------------------------- KV events


async def _subscribe(context: zmq.asyncio.Context, feed: EventFeed, endpoint: str, replay: str, wait_s: float) -> None:
    """Apply what is published at `endpoint`, for ever. What a new router or a slow one missed comes from `replay`."""
    socket: zmq.asyncio.Socket = context.socket(zmq.SUB)
    socket.rcvhwm = SUBSCRIBED
    socket.maxmsgsize = LARGEST_BATCH
    socket.subscribe(b"")
    socket.connect(endpoint)
    try:
        if replay:
            await _catch_up(context, feed, replay, wait_s)
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                feed.num_unread += 1
                continue
            number = int.from_bytes(frames[1], "big")
            if feed.take(number, frames[2]):
                continue
            if replay:
                await _catch_up(context, feed, replay, wait_s)
            feed.accept(number, frames[2])
    finally:
        socket.close(0)


async def _catch_up(context: zmq.asyncio.Context, feed: EventFeed, replay: str, wait_s: float) -> None:
    """Ask for everything since the last batch; gives up if nothing comes for `wait_s` seconds."""
    socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
    socket.maxmsgsize = LARGEST_BATCH
    socket.connect(replay)
    try:
        await socket.send_multipart((b"", feed.wanted.to_bytes(NUMBER_BYTES, "big")))
        while True:
            async with asyncio.timeout(wait_s):
                frames = await socket.recv_multipart()
            if len(frames) != 3 or frames[1] == REPLAY_END:
                return
            feed.accept(int.from_bytes(frames[1], "big"), frames[2])
    except TimeoutError:
        _log.warning("%s replays no KV events", urlsplit(replay).netloc or replay)
    finally:
        socket.close(0)
