"""Answers for tests of replies: one choice with reasoning, text and two calls, cut anywhere."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from rackserve.api.answer import Delta, Ending
from rackserve.api.ask import Ask
from rackserve.api.call import Call
from rackserve.api.dialects.dialect import Dialect, Event
from rackserve.base.request import Request
from rackserve.text.answers import PlainParser
from rackserve.text.dsml_parser import ArgumentsDelta, CallFinished, CallStarted, ContentDelta, OutputDelta, ReasoningDelta

PARTS: tuple[OutputDelta, ...] = (
    ReasoningDelta("Let me "), ReasoningDelta("see."), ContentDelta("It "), ContentDelta("is:"), CallStarted(0, "look"),
    ArgumentsDelta(0, '{"at":'), ArgumentsDelta(0, ' "é"}'), CallFinished(0),
    CallStarted(1, "go"), ArgumentsDelta(1, "{}"), CallFinished(1),
)  # fmt: skip
END = Ending("stop", 10, 4, 9, 1, reasoning_tokens=3, num_calls=2)


def called(dialect: Dialect, body: dict[str, Any]) -> Call:
    """A call of `dialect` with one choice of ten prompt tokens."""
    ask: Ask = dialect.parse(msgspec.json.encode(body), {})
    request = Request("r-0", "s", b"", b"", 10, 50)
    return Call(id="resp_1", created=7, model="tiny", ask=ask, requests=(request,), parser=PlainParser)


def deltas(parts: tuple[OutputDelta, ...] = PARTS, ending: Ending = END, seed: int = 0) -> list[Delta]:
    """`parts` in deltas cut by `seed`; the ending comes with the last or alone."""
    draw = random.Random(seed)
    found, at = [], 0
    while at < len(parts):
        size = draw.randint(1, 4)
        found.append(Delta(0, parts[at : at + size]))
        at += size
    if found and draw.random() < 0.5:
        found[-1] = msgspec.structs.replace(found[-1], ending=ending)
        return found
    return [*found, Delta(0, (), (), ending)]


def values(events: list[Event]) -> list[Any]:
    return [msgspec.json.decode(event.data) for event in events]


def streamed(dialect: Dialect, call: Call, given: list[Delta]) -> list[Any]:
    """Every event of the stream of `given`; each has its name on its `event:` line."""
    reply = dialect.reply(call)
    events = [event for delta in given for event in reply.events(delta)] + reply.closing()
    told = values(events)
    assert [event.name for event in events] == [value["type"] for value in told]
    return told


def whole(dialect: Dialect, call: Call, given: list[Delta]) -> Any:
    return msgspec.json.decode(dialect.reply(call).body(given))
