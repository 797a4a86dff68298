"""Law I13 over HTTP: every answer is that of a cold single server, whatever was cached, fetched, moved or interleaved."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.e2e.rig import cold, complete, is_idle, metric, prompt, serve, stream, until

ARMS = {
    "pool": ["--set", "topology.pool=true", "--set", "router.policy=least_uncached_work"],
    "no_pool": ["--set", "topology.pool=false", "--set", "router.policy=session_affinity"],
    "wide": ["--set", "topology.decode_ranks=2", "--set", "topology.decode_tp=2", "--set", "topology.prefill_tp=2"],
}
SMALL = ["--set", "topology.prefill_blocks=32", "--set", "topology.decode_blocks=100", "--set", "topology.segment_blocks=24"]
"""Fewer blocks than the sessions need together, so that eviction, spilling and fetching happen."""

SESSIONS, TURNS = 6, 4


@pytest.mark.parametrize("arm", ARMS)
def test_growing_sessions_get_the_answers_of_a_cold_server(arm: str, tmp_path: Path, digest: list[str]) -> None:
    async def session(client: httpx.AsyncClient, number: int) -> int:
        ids, cached = prompt("system", 70) + prompt(f"session {number}", 30 + 7 * number), 0
        ask = stream if number % 2 else complete
        for turn in range(TURNS):
            answer = await ask(client, ids, 5 + turn, session_id=f"s{number}")
            assert answer.tokens == cold(ids, 5 + turn), (number, turn, answer)
            assert answer.finish == "length" and answer.usage["prompt_tokens"] == len(ids)
            assert answer.usage["completion_tokens"] == 5 + turn and 0 <= answer.cached < len(ids)
            cached += answer.cached
            ids = ids + answer.tokens + prompt(f"turn {number} {turn}", 40)
        return cached

    async def work(client: httpx.AsyncClient) -> None:
        cached = await asyncio.gather(*(session(client, number) for number in range(SESSIONS)))
        assert sum(cached) > 0
        await until(lambda: is_idle(client), 5, "idle")
        assert await metric(client, 'requests_total{outcome="finished"}') == SESSIONS * TURNS
        assert await metric(client, "cached_prompt_tokens_total") == sum(cached)
        if arm != "no_pool":
            await until(lambda: metric(client, 'transfers_total{kind="fetch",outcome="finished"}'), 5, "fetches are counted")
        await until(lambda: metric(client, "blocks_evicted_total"), 5, "evictions are counted")

    with serve(tmp_path, *digest, *ARMS[arm], *SMALL) as rack:
        rack.run(work)
