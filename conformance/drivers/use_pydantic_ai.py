"""pydantic-ai, whose models of answers are strict. Arguments: url and model of the embedded model, and of the scripted one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from tell import tried

URL, MODEL, SCRIPTED_URL, SCRIPTED = sys.argv[1:]
QUESTION = "What is the capital of France?"
HEARD = "The tool was heard."
Model = Callable[..., OpenAIChatModel | OpenAIResponsesModel]


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Oslo"]


def agent(kind: Model, url: str, model: str, **fields: object) -> Agent:
    settings = ModelSettings(temperature=0, max_tokens=80, timeout=90)
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return Agent(kind(model, provider=provider), model_settings=settings, **fields)


def streams(kind: Model) -> None:
    async def body() -> tuple[str, str]:
        one = agent(kind, URL, MODEL)
        plain = await one.run(QUESTION)
        async with one.run_stream(QUESTION) as streamed:
            text = "".join([part async for part in streamed.stream_text(delta=True, debounce_by=None)])
        assert streamed.usage.output_tokens == plain.usage.output_tokens > 0, (streamed.usage, plain.usage)
        assert streamed.usage.cache_read_tokens > 0, streamed.usage
        return plain.output, text

    plain, text = asyncio.run(body())
    assert text == plain and "Paris" in text, (text, plain)


def calls(kind: Model) -> None:
    heard: list[str] = []

    def weather(city: str) -> str:
        """The weather of a city."""
        heard.append(city)
        return "cold"

    async def body() -> tuple[str, str]:
        one = agent(kind, SCRIPTED_URL, SCRIPTED, tools=[weather])
        plain = (await one.run("How is Oslo?")).output
        async with one.run_stream("How is Oslo?") as streamed:
            return plain, await streamed.get_output()

    assert asyncio.run(body()) == (HEARD, HEARD)
    assert heard == ["Oslo", "Oslo"], heard


def structured(kind: Model) -> None:
    for output in (NativeOutput(City), ToolOutput(City)):
        found = agent(kind, URL, MODEL, output_type=output).run_sync("Name a city.").output
        assert isinstance(found, City), found


for over, kind in (("chat completions", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
    tried(f"{over}: streams what it answers", lambda kind=kind: streams(kind))
    tried(f"{over}: a tool is called and heard", lambda kind=kind: calls(kind))
    tried(f"{over}: an answer keeps to its schema", lambda kind=kind: structured(kind))
