"""A server that answers by a timetable on virtual time, and a client that replays against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx

from rackserve.base.keys import CacheNamespace
from rackserve.base.units import to_ns
from rackserve.bench.client import Target, replay_over_http
from rackserve.bench.ideal import IdealCache
from rackserve.bench.metrics import Summary, summarize
from rackserve.bench.plan import IdleCaps, Plan
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.records import RequestRecord, RunInfo
from rackserve.bench.session import Session
from rackserve.bench.tally import Tally
from tests.bench.toys import VirtualLoop, request, session

NO_CAPS = IdleCaps(to_ns(1e6), to_ns(1e6))
Piece = float | dict[str, Any] | str | Exception
"""What a stub answer is made of: a wait in seconds, an event, raw text, or a failure of the connection."""
Answer = Callable[[dict[str, Any], httpx.Request], Sequence[Piece]]


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": value} | more]}


def end(prompt: int, output: int, cached: int = 0) -> list[Piece]:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return [text("", finish_reason="length"), {"choices": [], "usage": usage}, "data: [DONE]\n\n"]


class Stub(httpx.AsyncBaseTransport):
    """A server that answers by a timetable."""

    def __init__(self, answer: Answer, status: Callable[[int], int] = lambda number: 200) -> None:
        self.answer, self.status = answer, status
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        status = self.status(len(self.requests) - 1)
        if status != 200:
            body = {"error": {"message": "no", "code": "context_length_exceeded" if status == 400 else "broken"}}
            return httpx.Response(status, json=body)
        pieces = self.answer(json.loads(request.content), request)
        if pieces and isinstance(pieces[0], Exception):
            raise pieces[0]
        return httpx.Response(200, stream=_Stream(pieces))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, float | int):
                await asyncio.sleep(piece)
            else:
                yield (piece if isinstance(piece, str) else f"data: {json.dumps(piece)}\n\n").encode()


def run(plan: Plan, stub: Stub, tally: Tally | None = None, **target: Any) -> tuple[list[RequestRecord], float]:
    """Replay against the stub on virtual time: the records and the seconds it took."""
    loop = VirtualLoop()
    maker = RequestMaker(CacheNamespace("m", "r", 4, "l"))
    where = Target("http://stub/v1/", "m", **target)
    try:
        replay = replay_over_http(plan, maker, IdealCache(4), where, tally=tally, transport=stub, now=loop.now_ns)
        return loop.run_until_complete(replay), loop.time()
    finally:
        loop.close()


def singles(count: int, every_s: float = 0.0, outputs: int = 4) -> list[Session]:
    return [session(f"s{n:03}", request(n * every_s, 1, (n,), outputs)) for n in range(count)]


def figures(records: list[RequestRecord], plan: Plan | None = None) -> Summary:
    return summarize(RunInfo("x", "live", 1, 1, steady_end_ns=plan.steady_end_ns if plan else None), records)
