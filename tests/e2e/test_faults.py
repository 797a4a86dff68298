"""Processes are killed while requests run: answers stay exact, the rack comes back, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.rig import (
    GONE_WITHIN_S,
    Rack,
    cold,
    complete,
    is_idle,
    left_behind,
    members,
    metric,
    prompt,
    serve,
    shared_memory,
    stream,
    until,
)

PROMPTS = [prompt(f"request {number}", 3_000) for number in range(5)]
OUTPUTS = 150
"""Enough that a rank is still at it when the kill lands, also on a busy machine."""


ROUNDS = 4
"""A kill may land just after a rank's work is done; then there is another round."""


async def kill_while_busy(client: httpx.AsyncClient, rack: Rack, worker: str, device: int) -> None:
    """End the process of one of the worker's devices once the worker has begun to compute."""
    name = f'step_tokens_total{{rank="{worker}.0"}}'
    before = await metric(client, name)

    async def has_begun() -> bool:
        return await metric(client, name) > before

    await until(has_begun, 10, f"{worker} is busy")
    os.kill(rack.devices_of(worker)[device], signal.SIGKILL)


@pytest.mark.parametrize(
    ("worker", "device", "wide"),
    [
        ("prefill0", 0, []),
        ("decode0", 0, []),
        ("decode0", 0, ["--set", "topology.decode_ranks=2", "--set", "topology.decode_tp=2"]),
        ("decode0", 2, ["--set", "topology.decode_ranks=2", "--set", "topology.decode_tp=2"]),
    ],
)
def test_a_killed_rank_costs_no_answer_and_comes_back(
    worker: str, device: int, wide: list[str], tmp_path: Path, digest: list[str]
) -> None:
    async def one_round(client: httpx.AsyncClient, number: int) -> None:
        prompts = [prompt(f"round {number}, request {index}", 3_000) for index in range(5)]
        answers = [asyncio.create_task(stream(client, ids, OUTPUTS)) for ids in prompts]
        await kill_while_busy(client, rack, worker, device)
        for ids, answer in zip(prompts, await asyncio.gather(*answers), strict=True):
            assert answer.error == "" and answer.tokens == cold(ids, OUTPUTS), answer

        async def is_back() -> bool:
            restarts = await metric(client, f'rank_restarts_total{{rank="{worker}.0"}}')
            return restarts == number and await metric(client, f'rank_up{{rank="{worker}.0"}}') == 1

        await until(is_back, 10, f"{worker} is up again")
        assert await metric(client, 'requests_total{outcome="finished"}') == number * len(prompts)

    async def work(client: httpx.AsyncClient) -> None:
        for number in range(1, ROUNDS + 1):
            await one_round(client, number)
            if await metric(client, "attempts_retried_total"):
                break
        assert await metric(client, "attempts_retried_total") > 0, "no kill hit a request"
        await until(lambda: is_idle(client), 5, "idle")
        again = prompt("after the restart", 400)
        assert (await complete(client, again, 4)).cached == 0
        later = await asyncio.gather(*(complete(client, again, 4) for _ in range(4)))
        assert [answer.tokens for answer in later] == [cold(again, 4)] * 4
        assert max(answer.cached for answer in later) >= 384

    options = ["--set", "scheduler.max_batched_tokens=16", "--set", "topology.decode_blocks=2000", *wide]
    with serve(tmp_path, *digest, *options) as rack:
        rack.run(work)


def test_killing_the_control_process_ends_everything(tmp_path: Path, digest: list[str]) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        shared = shared_memory()
        answers = [asyncio.create_task(ask(client, ids, 2_000)) for ids in PROMPTS for ask in (stream, complete)]
        await until(lambda: metric(client, 'requests_running{rank="decode0.0"}'), 10, "requests run")
        ranks = members(rack.command.process.pid)
        assert len(ranks) == 4
        killed = time.monotonic()
        rack.command.signal(signal.SIGKILL)
        assert {answer.error for answer in await asyncio.wait_for(asyncio.gather(*answers), GONE_WITHIN_S)} == {"closed"}
        rack.command.process.wait(GONE_WITHIN_S)
        rack.command.leaves_nothing(killed + GONE_WITHIN_S - time.monotonic())
        assert not left_behind(shared)

    with serve(tmp_path, *digest) as rack:
        rack.run(work)
