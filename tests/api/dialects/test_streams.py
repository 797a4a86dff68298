"""Ten thousand answers in four dialects: a stream, joined, is the plain answer, however the tokens of either came grouped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from rackserve.api.answer import Delta, choice
from rackserve.api.call import Call
from rackserve.api.dialects.chat import Chat
from rackserve.api.dialects.completions import Completions
from rackserve.api.dialects.dialect import Dialect, Event
from rackserve.api.dialects.messages import Messages
from rackserve.api.dialects.responses import Responses
from rackserve.base.messages import Output
from rackserve.base.request import Request, Usage
from rackserve.base.step import TokenLogprobs
from rackserve.text.parsers import ParserChoice
from tests.text.small_model import EOS, small_tokenizer
from tests.text.test_stream import CHOICES, PARTS, STOPS, ids_of

CASES = 10_000
USER = [{"role": "user", "content": "x"}]


class Rack:
    """A gateway that gives `ids` in groups drawn by `draw`, then ends with `finish`."""

    def __init__(self, ids: list[int], draw: random.Random, finish: str, logprobs: bool) -> None:
        self.ids, self.draw, self.finish, self.logprobs = ids, draw, finish, logprobs

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        at = 0
        while at < len(self.ids):
            size = self.draw.randrange(1, 6)
            part = tuple(self.ids[at : at + size])
            last = at + size >= len(self.ids)
            scores = tuple(TokenLogprobs(-token / 7, ((token, -token / 7),)) for token in part) if self.logprobs else ()
            usage = Usage(3, 1, len(self.ids)) if last else None
            yield Output(request.id, at, part, finish=self.finish if last else None, usage=usage, logprobs=scores)  # type: ignore[arg-type]
            at += size

    def cancel(self, request: str, reason: str) -> None:
        """A stop string was found; what is left comes all the same, and is not shown."""


async def deltas(call: Call, rack: Rack) -> list[Delta]:
    return [delta async for delta in choice(rack, small_tokenizer(), call, 0, lambda wait, count: None)]  # type: ignore[arg-type]


def asked(number: int, stops: tuple[str, ...], logprobs: bool) -> tuple[Dialect, dict[str, Any]]:
    """One of the four dialects, and a body for it."""
    stop: dict[str, Any] = {"stop": list(stops)} if stops else {}
    kind = number % 4
    if kind == 0:
        return Completions(), {"prompt": "x", **stop, **({"logprobs": 1} if logprobs else {})}
    if kind == 1:
        return Chat(), {"messages": USER, **stop, **({"logprobs": True, "top_logprobs": 1} if logprobs else {})}
    if kind == 2:
        return Responses(), {"model": "tiny", "input": "x", **({"top_logprobs": 1} if logprobs else {})}
    sequences = {"stop_sequences": list(stops)} if stops else {}
    return Messages(), {"model": "tiny", "max_tokens": 9, "messages": USER, **sequences}


def read_openai(values: list[Any]) -> Any:
    """What a client of either OpenAI endpoint has at the end of a stream."""
    text, reasoning, finish, calls, scores = "", "", None, {}, []  # type: ignore[var-annotated]
    for value in values:
        (part,) = value["choices"]
        finish = part["finish_reason"] or finish
        delta = part.get("delta", part)
        text += delta.get("text", delta.get("content") or "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(
                call["index"], {"id": call.get("id"), "name": call["function"].get("name"), "arguments": ""}
            )
            known["arguments"] += call["function"].get("arguments", "")
        found = part["logprobs"] or {}
        scores += found.get("content") or list(
            zip(*(found[name] for name in ("tokens", "token_logprobs", "text_offset")), strict=True) if found else ()
        )
    return text, reasoning, list(calls.values()), scores, finish


def read_openai_body(body: Any) -> Any:
    (part,) = body["choices"]
    message = part.get("message", {"content": part.get("text")})
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    found = part["logprobs"] or {}
    scores = found.get("content") or list(
        zip(*(found[name] for name in ("tokens", "token_logprobs", "text_offset")), strict=True) if found else ()
    )
    return message["content"] or "", message.get("reasoning_content", ""), calls, scores, part["finish_reason"]


def read_message(values: list[Any]) -> Any:
    """The blocks and the end of a message, as a client builds them from events."""
    blocks: list[Any] = []
    arguments: dict[int, str] = {}
    ended: Any = None
    for value in values:
        match value["type"]:
            case "content_block_start":
                assert value["index"] == len(blocks)
                blocks.append(value["content_block"])
            case "content_block_delta":
                delta, block = value["delta"], blocks[value["index"]]
                for name in ("text", "thinking"):
                    if delta["type"] == f"{name}_delta":
                        block[name] += delta[name]
                if delta["type"] == "input_json_delta":
                    arguments[value["index"]] = arguments.get(value["index"], "") + delta["partial_json"]
            case "message_delta":
                ended = (value["delta"]["stop_reason"], value["delta"]["stop_sequence"], value["usage"])
    for index, text in arguments.items():
        try:
            blocks[index]["input"] = msgspec.json.decode(text)
        except msgspec.DecodeError:  # it was cut off: whoever reads the plain answer gets no arguments
            blocks[index]["input"] = {}
    return blocks, ended


def read_response(values: list[Any]) -> Any:
    """The whole that the last event holds, after its items have been shown to grow to just that."""
    whole = values[-1]["response"]
    texts: dict[int, str] = {}
    for value in values:
        if value["type"].endswith(".delta"):
            texts[value["output_index"]] = texts.get(value["output_index"], "") + value["delta"]
    for index, item in enumerate(whole["output"]):
        shown = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts.get(index, "") == shown
    return {**whole, "completed_at": None}


def joined(kind: int, events: list[Event]) -> Any:
    values = [msgspec.json.decode(event.data) for event in events if event.data != b"[DONE]"]
    return read_openai(values) if kind < 2 else read_response(values) if kind == 2 else read_message(values)


def plain(kind: int, raw: bytes) -> Any:
    body = msgspec.json.decode(raw)
    if kind < 2:
        return read_openai_body(body)
    if kind == 2:
        return {**body, "completed_at": None}
    return body["content"], (body["stop_reason"], body["stop_sequence"], body["usage"])


async def compare(number: int, draw: random.Random) -> bool:
    """Whether the answer held tool calls."""
    logprobs, stops = draw.random() < 0.5 and number % 4 != 3, draw.choice(STOPS)
    dialect, body = asked(number, stops, logprobs)
    reader: ParserChoice = CHOICES[draw.randrange(len(CHOICES))]
    ids = [*ids_of(draw, "".join(draw.choices(PARTS, k=draw.randrange(1, 9)))), EOS]
    finish = draw.choice(["stop", "length"])
    ask = dialect.parse(msgspec.json.encode(body), {})
    request = Request("r-0", "s", b"\0" * 12, b"", 3, 500, stop_token_ids=(EOS,), logprobs=0 if logprobs else -1)
    call = Call(id="resp_1", created=7, model="tiny", ask=ask, requests=(request,), parser=reader.parser)
    first, second = [await deltas(call, Rack(ids, draw, finish, logprobs)) for _ in range(2)]
    reply = dialect.reply(call)
    events = [event for delta in first for event in reply.events(delta)] + reply.closing()
    assert joined(number % 4, events) == plain(number % 4, dialect.reply(call).body(second)), (number, body, ids)
    ending = first[-1].ending
    assert ending is not None
    return ending.num_calls > 0


def test_a_stream_joined_is_the_plain_answer_for_any_grouping_of_tokens() -> None:
    async def all_cases() -> int:
        draw = random.Random(6)
        return sum([await compare(number, draw) for number in range(CASES)])

    assert asyncio.run(all_cases()) > CASES / 200  # else the cases are too tame
