"""What the rack does not take on: too much work, and requests nobody can serve. Refusals are quick, plain and harmless."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.rig import Answer, Rack, cold, complete, is_idle, metric, prompt, serve, stream, until

CONTEXT = 4_096
BURST = 20
REFUSALS = 'error_responses_total{status="429"}'


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory, digest: list[str]) -> Iterator[Rack]:
    """Two prefill ranks with room for two requests each."""
    settings = ["router.max_queued_requests_per_rank=2", "scheduler.max_batched_tokens=16", "topology.prefill_blocks=256"]
    options = [part for setting in settings for part in ("--set", setting)]
    with serve(tmp_path_factory.mktemp("refusals"), *digest, *options) as running:
        yield running


def test_a_full_queue_refuses_at_once_and_what_was_accepted_finishes(rack: Rack) -> None:
    prompts = [prompt(f"burst {number}", 3_500) for number in range(BURST)]

    async def work(client: httpx.AsyncClient) -> None:
        before = await metric(client, REFUSALS)

        async def timed(number: int) -> tuple[Answer, float]:
            begin = time.monotonic()
            answer = await (complete, stream)[number % 2](client, prompts[number], 10)
            return answer, time.monotonic() - begin

        results = await asyncio.gather(*(timed(number) for number in range(BURST)))
        refused, served = [], []
        for ids, (answer, took) in zip(prompts, results, strict=True):
            if answer.status == 200:
                assert answer.tokens == cold(ids, 10)
                served.append(took)
                continue
            refused.append(took)
            assert (answer.status, answer.error) == (429, "overloaded"), answer
            assert int(answer.headers["retry-after"]) > 0 and "router.max_queued_requests_per_rank" in answer.message
        assert 4 <= BURST - len(refused) < BURST
        assert sorted(refused)[len(refused) // 2] < sorted(served)[len(served) // 2], "a refusal does not wait for the queue"
        assert await metric(client, REFUSALS) == before + len(refused)
        await until(lambda: is_idle(client), 5, "idle")
        assert (await complete(client, prompts[0], 10)).tokens == cold(prompts[0], 10)

    rack.run(work)


IMPOSSIBLE: list[tuple[str, dict[str, Any], str, str]] = [
    ("a prompt longer than the context", {"prompt": [5] * CONTEXT}, "prompt", "context_length_exceeded"),
    ("an empty list", {"prompt": []}, "prompt", "empty_prompt"),
    ("an empty text", {"prompt": ""}, "prompt", "empty_prompt"),
    ("a list of nothing", {"prompt": [[]]}, "prompt", "empty_prompt"),
    ("no output tokens", {"max_tokens": 0}, "max_tokens", "invalid_value"),
    ("a fraction of a token", {"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ("a token nobody knows", {"prompt": [41_000]}, "prompt", "invalid_value"),
    ("a tool", {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
]


@pytest.mark.parametrize(("what", "change", "param", "code"), IMPOSSIBLE, ids=[case[0] for case in IMPOSSIBLE])
def test_a_request_nobody_can_serve_is_told_which_field_is_wrong(
    rack: Rack, what: str, change: dict[str, Any], param: str, code: str
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0, **change}
        for streamed in (False, True):
            response = await client.post("/v1/completions", json={**body, "stream": streamed})
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (400, param, code), what
        ids = prompt(what, 10)
        assert (await complete(client, ids, 2)).tokens == cold(ids, 2)

    rack.run(work)


def test_a_prompt_that_just_fits_is_served_to_the_last_position(rack: Rack) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        ids = prompt("edge", CONTEXT - 24)
        answer = await complete(client, ids, 60)
        assert answer.finish == "length" and answer.tokens == cold(ids, 24)
        full = await complete(client, prompt("edge", CONTEXT - 1), 5)
        assert len(full.tokens) == 1 and full.finish == "length"

    rack.run(work)
