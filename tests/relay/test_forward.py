"""A request passes unchanged, is tried again only before its first byte, and leaves nothing behind however it ends."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import pytest

from rackserve.relay.config import Retries, RouteConfig, Waits
from rackserve.relay.http import PATHS
from rackserve.relay.metrics import OUTCOMES
from rackserve.relay.prompts import PromptReader
from rackserve.route.placement import RouterConfig
from tests.relay.rig import PROMPT, WAITS, Rig, routing, run, until

STREAM = {"prompt": PROMPT, "stream": True}
WHOLE = {"prompt": PROMPT}


def limited(requests: int) -> RouterConfig:
    return RouterConfig(max_queued_requests_per_rank=requests)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_body_and_answer_pass_byte_for_byte_on_every_path(path: str, stream: bool) -> None:
    async def test() -> None:
        async with routing(1) as rig:
            body = msgspec.json.encode({"model": "m", "prompt": PROMPT, "stream": stream, "odd field": [1, None, "é"]})
            headers = {"authorization": "Bearer k", "x-own": "1", "connection": "x-hop, keep-alive", "x-hop": "2"}
            through = await rig.client.post(path, content=body, headers={**headers, "content-type": "application/json"})
            rig.workers[0].cache.blocks.clear()
            direct = await rig.client.post(rig.workers[0].url + path, content=body)
            assert through.content == direct.content
            assert through.status_code == direct.status_code == 200
            assert through.headers["content-type"] == direct.headers["content-type"]
            seen, plain = rig.workers[0].seen
            assert seen.path == path
            assert seen.body == plain.body
            assert seen.headers["authorization"] == "Bearer k"
            assert seen.headers["x-own"] == "1"
            assert "x-hop" not in seen.headers
            assert seen.headers["host"] == rig.workers[0].name
            await rig.quiet()
            assert rig.count("requests", "finished") == 1

    run(test)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500])
def test_what_a_worker_says_of_a_request_is_the_clients_answer(status: int) -> None:
    async def test() -> None:
        async with routing(2) as rig:
            for worker in rig.workers:
                worker.status = status
            answer = await rig.post(WHOLE)
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == f"stub says {status}"
            assert sum(len(worker.seen) for worker in rig.workers) == 1
            assert rig.count("retries") == 0
            await rig.quiet()
            counted = {outcome for outcome in OUTCOMES if rig.count("requests", outcome)}
            assert counted == {"failed" if status == 500 else "worker_refused"}

    run(test)


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_a_dead_worker_with_the_best_prefix_costs_one_try_and_the_client_sees_none(body: dict[str, object]) -> None:
    async def test() -> None:
        async with routing(3, waits=msgspec.structs.replace(WAITS, probe=5.0)) as rig:
            await rig.post(body)
            dead = next(worker for worker in rig.workers if worker.seen)
            await dead.stop()
            for _ in range(10):
                assert (await rig.post(body)).status_code == 200
            assert rig.count("failures", dead.name, "no_answer") == 1
            assert rig.relay.placer.index.holders() != []
            await rig.quiet()
            held = rig.relay.placer.index.match(
                rig.relay.reader.read("/v1/completions", msgspec.json.encode({"model": "m", **body}), {}).chain
            )
            assert all(rank.worker != dead.name for rank in held)

    run(test)


def test_a_worker_that_comes_back_is_empty_and_takes_work() -> None:
    async def test() -> None:
        async with routing(1) as rig:
            await rig.post(WHOLE)
            await rig.workers[0].stop()
            await until(lambda: not rig.relay.fleet.workers[0].up)
            refused = await rig.post(WHOLE)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert rig.relay.placer.index.num_runs == 0
            await rig.workers[0].start()
            await until(lambda: rig.relay.is_ready)
            assert (await rig.post(WHOLE)).status_code == 200

    run(test)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_worker_that_cannot_now_is_passed_over(status: int) -> None:
    async def test() -> None:
        async with routing(3) as rig:
            await rig.post(WHOLE)
            next(worker for worker in rig.workers if worker.seen).status = status
            assert (await rig.post(WHOLE)).status_code == 200
            assert rig.count("retries") == 1
            for worker in rig.workers:
                worker.status = status
            told = await rig.post(WHOLE)
            assert told.status_code == status  # nobody can: the client hears it as the last one said it
            assert told.json()["error"]["message"] == f"stub says {status}"
            await rig.quiet()

    run(test)


def test_tries_again_stop_at_the_budget() -> None:
    async def test() -> None:
        async with routing(2, retries=Retries(attempts=3, budget=0.0, failures=100)) as rig:
            for worker in rig.workers:
                worker.status = 503
            for _ in range(12):
                await rig.post(WHOLE)
            assert rig.count("retries") == 10
            assert rig.count("retries_denied") >= 1

    run(test)


def test_an_open_circuit_keeps_requests_away_until_one_tries() -> None:
    async def test() -> None:
        retries = Retries(attempts=1, failures=2, rest=0.05)
        async with routing(1, retries=retries) as rig:
            rig.workers[0].status = 503
            for _ in range(2):
                await rig.post(WHOLE)
            assert rig.relay.fleet.workers[0].breaker.state == "open"
            seen = len(rig.workers[0].seen)
            assert (await rig.post(WHOLE)).status_code == 503
            assert len(rig.workers[0].seen) == seen
            rig.workers[0].status = 200
            loop = asyncio.get_running_loop()
            await until(lambda: rig.relay.fleet.workers[0].breaker.allows(loop.time()))
            assert (await rig.post(WHOLE)).status_code == 200
            assert rig.relay.fleet.workers[0].breaker.state == "closed"

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_stream_that_breaks_off_ends_with_an_error_and_is_not_tried_again(path: str) -> None:
    async def test() -> None:
        async with routing(2) as rig:
            for worker in rig.workers:
                worker.cut = 3
            answer = await rig.post(STREAM, path)
            events = [event for event in answer.text.split("\n\n") if event]
            assert len(events) == 4
            assert '"text":"2"' in events[2]
            assert events[3].startswith("event: error\n") == (path == "/v1/messages")
            assert "broke off" in events[3]
            assert "[DONE]" not in answer.text
            assert sum(len(worker.seen) for worker in rig.workers) == 1
            await rig.quiet()
            assert rig.count("requests", "failed") == 1

    run(test)


def test_before_its_first_byte_a_stream_that_breaks_off_is_tried_elsewhere() -> None:
    async def test() -> None:
        async with routing(2) as rig:
            await rig.post(STREAM)
            next(worker for worker in rig.workers if worker.seen).cut = 0
            answer = await rig.post(STREAM)
            assert answer.text.endswith("data: [DONE]\n\n")
            assert "error" not in answer.text

    run(test)


def test_an_answer_that_is_no_stream_never_looks_complete_when_it_is_not() -> None:
    async def test() -> None:
        async with routing(1) as rig:

            async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n" + b'{"a": ')
                await writer.drain()
                writer.close()

            await rig.workers[0].stop()
            server = await asyncio.start_server(cut, "127.0.0.1", rig.workers[0].port)
            rig.relay.fleet.workers[0].up = True
            with pytest.raises(httpx.RemoteProtocolError):
                await rig.post(WHOLE)
            server.close()
            await rig.quiet()

    run(test)


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_a_client_that_hangs_up_ends_the_workers_request(body: dict[str, object]) -> None:
    async def test() -> None:
        async with routing(1) as rig:
            rig.workers[0].hold = asyncio.Event()
            call = asyncio.create_task(rig.post(body))
            await until(lambda: rig.workers[0].num_open == 1)
            call.cancel()
            await rig.quiet()
            assert rig.count("requests", "hung_up") == 1

    run(test)


def test_a_client_that_hangs_up_while_it_waits_leaves_the_line() -> None:
    async def test() -> None:
        async with routing(1, change=lambda config: msgspec.structs.replace(config, router=limited(1))) as rig:
            rig.workers[0].hold = asyncio.Event()
            calls = [asyncio.create_task(rig.post(STREAM)) for _ in range(3)]
            await until(lambda: len(rig.relay.line) == 2)
            for call in calls:
                call.cancel()
            await rig.quiet()
            assert len(rig.workers[0].seen) == 1

    run(test)


def test_overload_is_told_at_once_and_what_was_accepted_is_served() -> None:
    def small(config: RouteConfig) -> RouteConfig:
        return msgspec.structs.replace(config, router=limited(1), queued=3)

    async def test() -> None:
        async with routing(1, change=small) as rig:
            rig.workers[0].hold = asyncio.Event()
            calls = [asyncio.create_task(rig.post(WHOLE)) for _ in range(4)]
            await until(lambda: len(rig.relay.line) == 3)
            refused = await rig.post(WHOLE)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "overloaded"
            assert refused.headers["retry-after"]
            rig.workers[0].hold.set()
            assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 4
            await rig.quiet()

    run(test)


@pytest.mark.parametrize("path", PATHS)
def test_load_is_what_is_in_flight_on_every_path(path: str) -> None:
    async def test() -> None:
        async with routing(3) as rig:
            for worker in rig.workers:
                worker.hold = asyncio.Event()
            calls = [asyncio.create_task(rig.post({"prompt": PROMPT, "stream": at % 2 == 0}, path)) for at in range(12)]
            await until(lambda: sum(worker.num_open for worker in rig.workers) == 12)
            for known in rig.relay.fleet.workers:
                assert known.in_flight == rig.worker(known.name).num_open
                booked = [rig.relay.placer.load.booked(rank)[1] for rank in known.config.ranks]
                assert sum(booked) == known.in_flight
            for worker in rig.workers:
                assert worker.hold is not None
                worker.hold.set()
            await asyncio.gather(*calls)
            await rig.quiet()

    run(test)


def test_the_rank_chosen_is_the_one_the_worker_is_told() -> None:
    async def test() -> None:
        async with routing(3, dp_ranks=(1, 2, 4)) as rig:
            for session in range(20):
                await rig.post({"prompt": " ".join(map(str, range(session * 1000, session * 1000 + 200)))})
            told = {worker.name: {seen.headers.get("x-data-parallel-rank") for seen in worker.seen} for worker in rig.workers}
            assert told == {
                rig.workers[0].name: {None},
                rig.workers[1].name: {"0", "1"},
                rig.workers[2].name: {"0", "1", "2", "3"},
            }

    run(test)


def test_a_rank_the_client_asks_for_is_kept_or_refused() -> None:
    async def test() -> None:
        async with routing(2, dp_ranks=(2, 2)) as rig:
            for _ in range(4):
                assert (await rig.post(WHOLE, x_data_parallel_rank="1")).status_code == 200
            assert {seen.headers["x-data-parallel-rank"] for worker in rig.workers for seen in worker.seen} == {"1"}
            for wrong in ("7", "-1", "x", "1e3"):
                assert (await rig.post(WHOLE, x_data_parallel_rank=wrong)).status_code == 400

    run(test)


def test_nothing_longer_than_its_limits_is_waited_for() -> None:
    async def test() -> None:
        waits = Waits(head=0.05, gap=5, total=5, probe=5, grace=5, queue=5)
        async with routing(2, waits=waits, retries=Retries(attempts=2)) as rig:
            for worker in rig.workers:
                worker.hold = asyncio.Event()
            answer = await rig.post(WHOLE)
            assert answer.status_code == 503
            assert "no first byte" in answer.json()["error"]["message"]
            await rig.quiet()

    run(test)


def test_one_slow_request_says_nothing_of_the_others_on_its_worker() -> None:
    async def test() -> None:
        waits = Waits(head=0.05, gap=5, total=5, probe=5, grace=5, queue=5)
        async with routing(1, waits=waits, retries=Retries(attempts=1)) as rig:
            rig.relay.placer.records[rig.relay.fleet.workers[0].config.ranks[0]].note(b"k" * 16, 0)
            rig.workers[0].hold = asyncio.Event()
            assert (await rig.post(WHOLE)).status_code == 503
            assert rig.relay.is_ready
            assert rig.relay.placer.records[rig.relay.fleet.workers[0].config.ranks[0]].num_blocks == 1
            await rig.quiet()

    run(test)


def test_a_whole_answer_has_a_limit() -> None:
    async def test() -> None:
        waits = Waits(head=5, gap=5, total=0.05, probe=5, grace=5, queue=5)
        async with routing(1, waits=waits) as rig:
            rig.workers[0].hold = asyncio.Event()
            assert (await rig.post(WHOLE)).status_code == 504
            await rig.quiet()

    run(test)


def test_a_worker_that_goes_down_ends_the_waits_for_it() -> None:
    async def test() -> None:
        async with routing(2) as rig:
            for worker in rig.workers:
                worker.hold = asyncio.Event()
            call = asyncio.create_task(rig.post(WHOLE))
            await until(lambda: any(worker.num_open for worker in rig.workers))
            first = next(worker for worker in rig.workers if worker.num_open)
            other = next(worker for worker in rig.workers if worker is not first)
            rig.relay.lose(rig.relay.fleet.by_name(first.name))  # it hangs with its socket open; its health says so
            await until(lambda: other.num_open == 1)
            assert other.hold is not None
            other.hold.set()
            assert (await call).status_code == 200
            await rig.quiet()

    run(test)


def test_a_bug_is_told_without_its_details(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("secret")

    async def test() -> None:
        async with routing(1) as rig:
            monkeypatch.setattr(PromptReader, "read", fails)
            answer = await rig.post(WHOLE)
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal" and "secret" not in answer.text
            await rig.quiet()
            assert rig.count("requests", "failed") == 1

    run(test)


async def ends_while_open(rig: Rig) -> None:
    rig.workers[0].hold = asyncio.Event()
    call = asyncio.create_task(rig.post(STREAM))
    await until(lambda: rig.workers[0].num_open == 1)
    rig.stop.set()
    await until(lambda: rig.relay.draining)
    assert (await rig.client.get("/health")).status_code == 503
    refused = await rig.post(WHOLE)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    return_to = rig.workers[0].hold
    if rig.relay.config.waits.grace > 1:
        return_to.set()
        assert (await call).text.endswith("[DONE]\n\n")
    else:
        assert (await call).status_code == 503
    await rig.serving
    await rig.quiet()


@pytest.mark.parametrize("grace", [5.0, 0.2])
def test_a_router_that_is_told_to_stop_lets_answers_end_within_its_limit(grace: float) -> None:
    async def test() -> None:
        async with routing(1, waits=msgspec.structs.replace(WAITS, grace=grace)) as rig:
            await ends_while_open(rig)

    run(test)
