"""A real model end to end: a conversation over HTTP against a cold run of the same model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from rackserve.base.topology import Topology
from rackserve.base.units import blocks_for
from rackserve.config import ServerConfig, Settings
from rackserve.live.runner import RunnerSpec, layout_of, open_runner
from rackserve.serving import open_server
from rackserve.verify import TIE, Transcript, compare_with_cold

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

QUESTIONS = (
    "Name three colours of the rainbow and say in one sentence why the sky is blue on a clear day.",
    "Now write the same three colours in alphabetical order, please.",
    "Which of them comes first in the rainbow?",
)
OUTPUTS = 10


async def ask(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    """The streamed answer to a conversation, and its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"messages": messages, "max_tokens": OUTPUTS, "temperature": 0, **options}
    text, usage = "", dict[str, Any]()
    async with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-id": "talk"}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
                usage = chunk["usage"] or usage
    return text, usage


async def talk(settings: Settings, transcript: Transcript) -> list[dict[str, Any]]:
    """Hold the conversation on a served rack; the usage of each turn."""
    usages, messages = [], []
    async with (
        open_server(settings, tap=transcript) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            text, usage = await ask(client, messages)
            messages.append({"role": "assistant", "content": text})
            usages.append(usage)
    return usages


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_conversation_reuses_its_past_and_says_what_a_cold_model_says(dtype: str) -> None:
    spec = RunnerSpec(kind="llama", model="embedded", dtype=dtype, block_tokens=16)  # type: ignore[arg-type]
    topology = Topology(prefill_workers=1, decode_workers=1, prefill_blocks=40, decode_blocks=40, segment_blocks=40)
    transcript = Transcript()
    usages = asyncio.run(talk(Settings(topology=topology, runner=spec, server=ServerConfig(port=0)), transcript))
    prompts = [usage["prompt_tokens"] for usage in usages]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    assert prompts[0] // 16 * 16 <= cached[1] < prompts[1] and prompts[1] // 16 * 16 <= cached[2] < prompts[2]
    answers = list(transcript.answers.values())
    assert len(answers) == len(QUESTIONS) and all(answer.complete and answer.tokens for answer in answers)
    num_blocks = blocks_for(max(answer.request.num_tokens for answer in answers) + OUTPUTS, 16)
    runner = open_runner(spec, memoryview(bytearray(num_blocks * layout_of(spec).block_bytes)), num_blocks)
    differences = compare_with_cold(answers, runner, 16)
    allowed = TIE if dtype == "bf16" else 0.0
    assert [str(difference) for difference in differences if difference.gap > allowed] == []
