"""DeepSeek-V4.1 end to end: drafts, Engram, stored state and groups of devices against a cold rank that has none of them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest

from rackserve.base.rng import draw_below
from rackserve.base.topology import Topology
from rackserve.config import ServerConfig, Settings, load_settings
from rackserve.demo import PARALLEL
from rackserve.live.runner import RunnerSpec, layout_of
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.serving import open_server
from rackserve.verify import Answer, Transcript, compare_with_cold, open_cold

pytest.importorskip("torch")

SETTINGS = Settings(
    topology=Topology(prefill_workers=2, decode_workers=1, prefill_blocks=32, decode_blocks=48, segment_blocks=32),
    scheduler=SchedulerConfig(max_batched_tokens=128, max_sequences=8, max_steps_in_flight=1, num_draft=5),
    runner=RunnerSpec(kind="deepseek_v41", model="golden", block_tokens=16),
    server=ServerConfig(port=0),
).sized()

SESSIONS, TURNS, OUTPUTS = 3, 2, 9


def said(session: int, turn: int) -> list[int]:
    """What a session adds to its prompt at a turn; all sessions begin alike."""
    shared = [3 + draw_below(490, "system", place) for place in range(40)] if turn == 0 else []
    return shared + [3 + draw_below(490, "turn", session, turn, place) for place in range(20 + 3 * session)]


async def talk(client: httpx.AsyncClient, session: int) -> list[dict[str, Any]]:
    """Hold one conversation in token ids; the usage of each turn."""
    usages, prompt = [], list[int]()
    for turn in range(TURNS):
        prompt += said(session, turn)
        body = {"prompt": prompt, "max_tokens": OUTPUTS, "temperature": 0, "ignore_eos": True, "session_id": f"s{session}"}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert "error" not in answer, answer
        prompt += [int(word) for word in answer["choices"][0]["text"].split()]
        usages.append(answer["usage"])
    return usages


async def serve_talks(settings: Settings, transcript: Transcript) -> list[list[dict[str, Any]]]:
    async with (
        open_server(settings, tap=transcript) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert (chat.status_code, chat.json()["error"]["code"]) == (400, "no_chat_template")
        return await asyncio.gather(*(talk(client, session) for session in range(SESSIONS)))


def of_another_prompt(answer: Answer) -> Answer:
    """The answer as if it had been given to its prompt turned by one token."""
    tokens = answer.request.tokens
    return Answer(msgspec.structs.replace(answer.request, tokens=tokens[4:] + tokens[:4]), answer.tokens)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_conversations_reuse_their_past_and_say_what_a_cold_rank_says(parallel: str) -> None:
    fewer = ("topology.prefill_workers=1",) if parallel else ()  # each device is a process that loads torch
    settings = load_settings(None, (*PARALLEL[parallel], *fewer), SETTINGS)
    transcript = Transcript()
    for usages in asyncio.run(asyncio.wait_for(serve_talks(settings, transcript), 90)):
        assert [usage["completion_tokens"] for usage in usages] == [OUTPUTS] * TURNS
        for before, after in pairwise(usages):
            assert after["prompt_tokens_details"]["cached_tokens"] >= before["prompt_tokens"] // 16 * 16
    answers = list(transcript.answers.values())
    assert len(answers) == SESSIONS * TURNS and all(answer.complete for answer in answers)
    with open_cold(settings.runner, layout_of(settings.runner), 256, settings.topology.decode_tp) as runner:
        assert [str(difference) for difference in compare_with_cold(answers, runner, 16)] == []
        assert compare_with_cold([of_another_prompt(answers[0])], runner, 16), "a comparison that finds nothing proves nothing"
