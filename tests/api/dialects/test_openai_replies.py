from __future__ import annotations

from typing import Any

import msgspec

from rackserve.api.answer import Delta, Ending, TokenEntry
from rackserve.api.ask import Ask
from rackserve.api.call import Call
from rackserve.api.dialects.chat import ChatReply
from rackserve.api.dialects.completions import CompletionReply
from rackserve.api.dialects.dialect import Event
from rackserve.api.dialects.openai_replies import usage
from rackserve.base.request import Request
from rackserve.text.answers import PlainParser
from rackserve.text.dsml_parser import ContentDelta

END = Ending("stop", 10, 4, 3, 1)


def call(*, choices: int = 1, n: int = 1, usage: bool = False) -> Call:
    requests = tuple(Request(f"c-{number}", "s", b"", b"", 10, 5) for number in range(choices))
    ask = Ask(kind="chat", field="messages", n=n, stream=True, usage=usage)
    return Call(id="c", created=7, model="tiny", ask=ask, requests=requests, parser=PlainParser)


def say(text: str) -> tuple[ContentDelta, ...]:
    return (ContentDelta(text),) if text else ()


def values(events: list[Event]) -> list[Any]:
    return [msgspec.json.decode(event.data) for event in events]


def test_usage_counts_a_prompt_once_and_all_output() -> None:
    endings = [END, Ending("length", 10, 8, 5, 2), Ending("stop", 20, 1, 1, 1), Ending("stop", 20, 2, 1, 1)]
    assert usage(endings, 2) == {
        "prompt_tokens": 30,
        "completion_tokens": 10,
        "total_tokens": 40,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "attempts": 2,
    }


def test_a_chat_choice_opens_with_its_role_then_text_then_finish() -> None:
    reply = ChatReply(call())
    chunks = [*values(reply.events(Delta(0, say("hi")))), *values(reply.events(Delta(0, say("!"), (), END)))]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "hi"},
        {"content": "!"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        ("c", "chat.completion.chunk", 7, "tiny")
    }
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_is_null_on_other_chunks_when_asked_for() -> None:
    reply = CompletionReply(call(usage=True))
    assert [chunk["usage"] for chunk in values(reply.events(Delta(0, say("a"), (), END)))] == [None, None]
    last, done = reply.closing()
    (told,) = values([last])
    assert told["choices"] == [] and told["usage"]["total_tokens"] == 13 and done.data == b"[DONE]"


def test_the_body_joins_the_deltas_of_each_choice() -> None:
    reply = CompletionReply(call(choices=2, n=2))
    deltas = [Delta(1, say("x")), Delta(0, say("a")), Delta(1, say("y"), (), END), Delta(0, say("b"), (), END)]
    body = msgspec.json.decode(reply.body(deltas))
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "ab"), (1, "xy")]
    assert body["object"] == "text_completion" and body["usage"]["completion_tokens"] == 6


def test_log_probabilities_have_usable_text_and_finite_numbers() -> None:
    entries = (TokenEntry(0, "é".encode()[:1], -0.5, ((b"a", float("-inf")),)), TokenEntry(0, b"ok", float("nan"), ()))
    chat = msgspec.json.decode(ChatReply(call()).body([Delta(0, (), entries, END)]))["choices"][0]["logprobs"]["content"]
    assert chat[0]["token"] == "bytes:\\xc3" and chat[0]["bytes"] == [0xC3]
    assert chat[0]["top_logprobs"] == [{"token": "a", "logprob": -9999.0, "bytes": [97]}]
    plain = msgspec.json.decode(CompletionReply(call()).body([Delta(0, (), entries, END)]))["choices"][0]["logprobs"]
    assert plain["tokens"] == ["bytes:\\xc3", "ok"] and plain["token_logprobs"] == [-0.5, -9999.0]
    assert plain["top_logprobs"] == [{"a": -9999.0}, {}] and plain["text_offset"] == [0, 0]
    assert b"null" not in msgspec.json.encode([chat, plain])
