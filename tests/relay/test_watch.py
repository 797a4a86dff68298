"""Beside the requests: health, KV events over real sockets, and models."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rackserve.live.kv_events import KvEvent, KvPublisher, encode_batch
from rackserve.relay.door import WORKER_KEY_VARIABLE, Door
from rackserve.relay.watch import endpoint_of
from tests.relay.rig import Rig, routing, run, until
from tests.relay.stub import StubWorker


@pytest.mark.parametrize(
    ("base", "rank", "there"),
    [("tcp://h:5557", 0, "tcp://h:5557"), ("tcp://h:5557", 3, "tcp://h:5560"), ("ipc:///x", 2, "ipc:///x")],
)
def test_each_rank_publishes_so_many_ports_higher(base: str, rank: int, there: str) -> None:
    assert endpoint_of(base, rank) == there


def test_a_worker_is_up_once_it_answers_and_down_once_it_does_not() -> None:
    async def test() -> None:
        async with routing(2) as rig:
            await rig.workers[0].stop()
            await until(lambda: not rig.relay.fleet.by_name(rig.workers[0].name).up)
            assert rig.relay.is_ready
            await rig.workers[0].start()
            await until(lambda: rig.relay.fleet.by_name(rig.workers[0].name).up)

    run(test)


def test_requests_go_only_where_their_model_is_served() -> None:
    async def test() -> None:
        async with routing(workers=[StubWorker(model="a"), StubWorker(model="b")]) as rig:
            for _ in range(3):
                assert (await rig.post({"model": "b", "prompt": "1"})).status_code == 200
            assert [len(worker.seen) for worker in rig.workers] == [0, 3]
            assert (await rig.post({"model": "c", "prompt": "1"})).status_code == 404
            listed = (await rig.client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["a", "b"]

    run(test)


class Published:
    """Stub workers that publish what their caches do."""

    def __init__(self) -> None:
        self.publishers = [KvPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") for _ in range(2)]
        self.ts = 0.0
        self.lost: list[bool] = [False, False]
        self.workers = [StubWorker(tell=lambda events, at=at: self.tell(at, events), max_blocks=150) for at in range(2)]

    def tell(self, at: int, events: list[KvEvent]) -> None:
        self.ts += 1
        payload = encode_batch(self.ts, events, form="maps" if self.ts % 2 else "arrays")
        if self.lost[at]:  # numbered and kept, but heard by nobody
            publisher = self.publishers[at]
            publisher._kept.append((publisher.number.to_bytes(8, "big"), payload))
            publisher.number += 1
        else:
            self.publishers[at].publish(payload)

    def events(self, worker: StubWorker) -> dict[str, str]:
        publisher = self.publishers[self.workers.index(worker)]
        return {"events": publisher.endpoint, "replay": publisher.replay_endpoint}

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


def agrees(rig: Rig, prompts: list[list[int]]) -> bool:
    """Whether the router's index is what each worker's cache holds."""
    for prompt in prompts:
        chain = rig.relay.reader.read("/v1/completions", msgspec.json.encode({"prompt": prompt}), {}).chain
        held = {rank.worker: blocks for rank, blocks in rig.relay.placer.index.match(chain).items()}
        for worker in rig.workers:
            own = worker.cache.hashes(prompt)
            there = next((at for at, name in enumerate(own) if name not in worker.cache.blocks), len(own))
            if held.get(worker.name, 0) != there:
                return False
    return True


PROMPTS = [list(range(base, base + 200)) for base in range(0, 1200, 100)]


def test_the_index_is_what_workers_publish_through_evictions_losses_and_restarts() -> None:
    async def test() -> None:
        fleet = Published()
        try:
            async with routing(workers=fleet.workers, events=fleet.events, tokenizer="numbers") as rig:
                for prompt in PROMPTS[:6]:
                    await rig.post({"prompt": prompt})
                await until(lambda: agrees(rig, PROMPTS))
                fleet.lost = [True, True]
                for prompt in PROMPTS[6:9]:
                    await rig.post({"prompt": prompt})
                fleet.lost = [False, False]
                for prompt in PROMPTS[9:]:
                    await rig.post({"prompt": prompt}, x_session_id="s")
                for worker in fleet.workers:
                    worker.cache.use(PROMPTS[0][:8])
                    worker.cache.use([5, 5, 5, 5])
                await until(lambda: agrees(rig, PROMPTS))
                assert sum(feed.num_gaps for feeds in rig.relay.feeds.values() for feed in feeds) >= 1
                await rig.quiet()
        finally:
            fleet.close()

    run(test)


def test_a_router_that_starts_late_learns_what_workers_hold() -> None:
    async def test() -> None:
        fleet = Published()
        try:
            fleet.workers[0].cache.use(PROMPTS[0])
            fleet.workers[1].cache.use(PROMPTS[5])
            async with routing(workers=fleet.workers, events=fleet.events, tokenizer="numbers") as rig:
                await until(lambda: agrees(rig, PROMPTS) and rig.relay.placer.index.num_runs > 0)
                await rig.post({"prompt": PROMPTS[0]})
                await rig.post({"prompt": PROMPTS[5]})
                assert [len(worker.seen) for worker in rig.workers] == [1, 1]
                assert sum(rig.count("cached", worker.name) for worker in rig.workers) == 2 * 196
                assert [rig.count("predicted", worker.name) for worker in rig.workers] == [199, 199]
        finally:
            fleet.close()

    run(test)


def test_a_worker_whose_replay_does_not_answer_is_used_all_the_same() -> None:
    async def test() -> None:
        fleet = Published()
        try:
            silent = {"events": fleet.publishers[0].endpoint, "replay": "tcp://127.0.0.1:9"}
            async with routing(workers=fleet.workers[:1], events=lambda worker: silent, tokenizer="numbers") as rig:
                assert (await rig.post({"prompt": PROMPTS[0]})).status_code == 200
                await asyncio.sleep(0)
                await rig.quiet()
        finally:
            fleet.close()

    run(test)


def test_a_worker_that_asks_for_a_key_is_asked_with_it_or_the_remedy_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with routing(workers=[StubWorker(key="w")], door=Door(worker_key="w")) as rig:
            assert rig.relay.fleet.models() == {"m": 0} and not caplog.messages
        async with routing(workers=[StubWorker(key="w")]) as rig:
            worker = rig.relay.fleet.workers[0]
            await until(lambda: rig.workers[0].num_looks > 8)
            assert worker.up and not rig.relay.fleet.models()
            assert (await rig.post({"prompt": "1 2 3"})).status_code == 200
        (told,) = [message for message in caplog.messages if "models" in message]
        assert WORKER_KEY_VARIABLE in told and worker.name in told

    run(test)
