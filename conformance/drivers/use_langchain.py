"""langchain-openai. Arguments: url and model of the embedded model, and of the scripted one."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from tell import tried

URL, MODEL, SCRIPTED_URL, SCRIPTED = sys.argv[1:]
QUESTION = "What is the capital of France?"
HEARD = "The tool was heard."


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Oslo"]


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"cold in {city}"


def chat(url: str, model: str, **fields: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, temperature=0, stream_usage=True, timeout=90, max_retries=0, **fields
    )


def streams(responses: bool) -> None:
    client = chat(URL, MODEL, max_tokens=40, use_responses_api=responses)
    plain = client.invoke(QUESTION)
    chunks = list(client.stream(QUESTION))
    text = "".join(chunk.text for chunk in chunks)
    assert text == plain.text and "Paris" in text, (text, plain.text)
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    usage = whole.usage_metadata
    assert usage is not None and usage["output_tokens"] == plain.usage_metadata["output_tokens"], (usage, plain.usage_metadata)
    assert usage["input_token_details"]["cache_read"] > 0, usage


def calls(responses: bool) -> None:
    client = chat(SCRIPTED_URL, SCRIPTED, use_responses_api=responses).bind_tools([weather])
    asked = [HumanMessage("How is Oslo?")]
    answer = client.invoke(asked)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"city": "Oslo"})], answer
    whole = None
    for chunk in client.stream(asked):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Oslo"}], whole
    result = weather.invoke(answer.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert client.invoke([*asked, answer, result]).text == HEARD


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        found = chat(URL, MODEL, max_tokens=80).with_structured_output(City, method=method).invoke("Name a city.")
        assert isinstance(found, City), (method, found)


def many() -> None:
    answers = chat(URL, MODEL, max_tokens=5).batch([QUESTION, QUESTION, "Hello"])
    assert answers[0].text == answers[1].text and all(answer.text for answer in answers)


def scored() -> None:
    answer = chat(URL, MODEL, max_tokens=5, logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == 5 and all(len(each["top_logprobs"]) == 2 for each in content)


for over, flag in (("chat completions", False), ("responses", True)):
    tried(f"{over}: streams what it answers", lambda flag=flag: streams(flag))
    tried(f"{over}: a tool is called and heard", lambda flag=flag: calls(flag))
tried("an answer keeps to its schema", structured)
tried("several at once", many)
tried("log-probabilities", scored)
