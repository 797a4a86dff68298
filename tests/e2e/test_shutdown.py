"""The end of a server: it drains, keeps its word to those it serves, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.rig import (
    Answer,
    Rack,
    cold,
    command,
    complete,
    left_behind,
    members,
    metric,
    poll,
    prompt,
    serve,
    shared_memory,
    stream,
    until,
)

SIGNALS = [signal.SIGTERM, signal.SIGINT]


async def streams(client: httpx.AsyncClient, prompts: list[list[int]], outputs: int) -> list[asyncio.Task[Answer]]:
    """Streams of which each has begun."""
    begun = [asyncio.Event() for _ in prompts]
    tasks = [
        asyncio.create_task(stream(client, ids, outputs, lambda count, event=event: event.set()))  # type: ignore[misc]
        for ids, event in zip(prompts, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    return tasks


@pytest.mark.parametrize("number", SIGNALS)
def test_a_drain_lets_running_answers_end_and_refuses_new_ones(
    number: signal.Signals, tmp_path: Path, digest: list[str]
) -> None:
    prompts = [prompt(f"stream {name}", 900) for name in range(3)]

    async def work(client: httpx.AsyncClient) -> None:
        running = await streams(client, prompts, 250)
        rack.command.signal(number)
        rack.command.said("stopping")
        refused = await complete(client, prompt("late", 20), 2)
        assert (refused.status, refused.error) == (503, "draining") and int(refused.headers["retry-after"]) > 0
        health = await client.get("/health")
        assert health.status_code == 503 and health.json()["draining"] and not health.json()["ready"]
        for ids, answer in zip(prompts, await asyncio.gather(*running), strict=True):
            assert answer.error == "" and answer.finish == "length" and answer.tokens == cold(ids, 250)

    with serve(tmp_path, *digest) as rack:
        rack.run(work)
        assert rack.command.ends(10.0) == 0
    assert rack.command.errors == ""


def test_what_is_queued_when_a_drain_begins_ends_well(tmp_path: Path, digest: list[str]) -> None:
    """One rank of each role that takes one request at a time: the others wait at their rank."""
    running, queued = prompt("running", 2_000), [prompt(f"queued {number}", 500) for number in range(2)]

    async def work(client: httpx.AsyncClient) -> None:
        (first,) = await streams(client, [running], 100)
        waiting = [asyncio.create_task(complete(client, ids, 5)) for ids in queued]

        async def all_in() -> bool:
            return await metric(client, "requests_received_total") == 3

        await until(all_in, 5, "all arrived")
        rack.command.signal(signal.SIGTERM)
        for ids, count, answer in zip([running, *queued], (100, 5, 5), await asyncio.gather(first, *waiting), strict=True):
            assert (answer.status, answer.error) == (200, "") and answer.tokens == cold(ids, count)

    small = ["topology.prefill_workers=1", "scheduler.max_sequences=1", "scheduler.max_batched_tokens=16"]
    with serve(tmp_path, *digest, *(part for setting in small for part in ("--set", setting))) as rack:
        rack.run(work)
        assert rack.command.ends(10.0) == 0
    assert rack.command.errors == ""


@pytest.mark.parametrize("worker", ["prefill0", "decode0"])
def test_a_rank_that_is_told_to_end_costs_no_answer_and_comes_back(worker: str, tmp_path: Path, digest: list[str]) -> None:
    prompts = [prompt(f"stream {name}", 900) for name in range(3)]

    async def work(client: httpx.AsyncClient) -> None:
        running = await streams(client, prompts, 250)
        os.kill(pid := rack.pid_of(worker), signal.SIGTERM)
        for ids, answer in zip(prompts, await asyncio.gather(*running), strict=True):
            assert answer.error == "" and answer.tokens == cold(ids, 250), answer

        async def is_back() -> bool:
            return rack.pid_of(worker) not in (0, pid)

        await until(is_back, 10, "another process has taken its place")

    with serve(tmp_path, *digest) as rack:
        rack.run(work)


def test_an_answer_longer_than_the_grace_ends_with_an_error_event(tmp_path: Path, digest: list[str]) -> None:
    ids = prompt("long", 1_000)

    async def work(client: httpx.AsyncClient) -> None:
        (running,) = await streams(client, [ids], 7_000)
        rack.command.signal(signal.SIGTERM)
        answer = await running
        assert answer.status == 200 and answer.error == "draining" and answer.finish == ""
        assert 0 < len(answer.tokens) < 7_000 and answer.tokens[:20] == cold(ids, 20)

    with serve(tmp_path, *digest, "--set", "server.grace=0.5") as rack:
        rack.run(work)
        assert rack.command.ends(10.0) == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_does_not_wait_for_the_grace(number: signal.Signals, tmp_path: Path, digest: list[str]) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        (running,) = await streams(client, [prompt("long", 1_000)], 7_000)
        rack.command.signal(number)
        rack.command.said("stopping")

        async def insisted() -> bool:  # a signal on the heels of the first is the same one
            rack.command.signal(number)
            return running.done()

        await until(insisted, 10, "the second signal counts")
        assert (await running).error in ("draining", "closed")

    with serve(tmp_path, *digest, "--set", "server.grace=600") as rack:
        rack.run(work)
        assert rack.command.ends(10.0) == 130
    assert rack.command.errors == "rackserve: interrupted\n"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_start_up_ends_it(number: signal.Signals, tmp_path: Path, digest: list[str]) -> None:
    shared = shared_memory()
    with command(tmp_path, "serve", "--port", "0", *digest) as starting:
        poll(lambda: len(members(starting.process.pid)) > 1, 10, "ranks start")
        starting.signal(number)
        assert starting.ends(10.0) == 0, starting.errors
        assert starting.output.splitlines()[-1] == "stopped before it served" and starting.errors == ""
    assert not left_behind(shared)


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals, tmp_path: Path, digest: list[str]) -> None:
    shared = shared_memory()
    with command(tmp_path, "demo", "--serial", "--out", str(tmp_path / "demo"), *digest) as running:
        poll(lambda: len(members(running.process.pid)) == 4, 30, "the rack runs")
        running.signal(number)
        assert running.ends(10.0) == 130
        assert running.errors.splitlines()[-1] == "rackserve: interrupted" and "Traceback" not in running.errors
    assert not left_behind(shared)


def test_a_role_without_any_rank_left_makes_the_server_not_ready(tmp_path: Path, digest: list[str]) -> None:
    def health(rack: Rack) -> httpx.Response:
        return httpx.get(f"{rack.url}/health", trust_env=False)

    with serve(tmp_path, *digest, "--set", "supervisor.max_restarts=0") as rack:
        assert health(rack).status_code == 200
        os.kill(rack.pid_of("prefill1"), signal.SIGKILL)
        poll(lambda: rack.pid_of("prefill1") == 0, 3, "one prefill rank is gone")
        assert health(rack).status_code == 200
        os.kill(rack.pid_of("prefill0"), signal.SIGKILL)
        answer = poll(lambda: (found := health(rack)).status_code == 503 and found, 3, "not ready")
        assert answer and [rank["state"] for rank in answer.json()["ranks"]] == ["failed", "failed", "up"]
