"""Huge prompts hold nobody up: health is told and streams go on while they are read, refused or both."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx

from tests.e2e.rig import prompt, serve, stream

BODIES = [  # encoded beforehand: whoever measures must not be busy
    json.dumps({"prompt": "00ff" * (5 << 18), "max_tokens": 4}).encode(),  # 5 MB, of which this tokenizer makes nothing
    json.dumps({"prompt": [7] * 1_000_000, "max_tokens": 4}).encode(),
]
LIMIT_S = 0.25


async def health_times(client: httpx.AsyncClient, until: asyncio.Event) -> list[float]:
    times = []
    while not until.is_set():
        begun = time.monotonic()
        assert (await client.get("/ready")).status_code == 200
        times.append(time.monotonic() - begun)
        await asyncio.sleep(0.05)
    return times


def test_health_is_told_while_huge_prompts_are_read(tmp_path: Path, digest: list[str]) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        done = asyncio.Event()
        running = asyncio.create_task(stream(client, prompt("small", 40), 400))
        watching = asyncio.create_task(health_times(client, done))
        answers = await asyncio.gather(*(client.post("/v1/completions", content=body) for body in BODIES * 2))
        done.set()
        times = sorted(await watching)
        assert [answer.status_code for answer in answers] == [400] * 4
        assert {answer.json()["error"]["code"] for answer in answers[1::2]} == {"context_length_exceeded"}
        assert times[len(times) * 9 // 10] < LIMIT_S, times  # a shared machine may delay one by itself
        assert not (await running).error

    with serve(tmp_path, *digest) as rack:
        rack.run(work)
