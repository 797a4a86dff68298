"""The front end over a scripted frontend node, and clients that see raw bytes and can hang up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import msgspec

from rackserve.api.factory import RequestFactory
from rackserve.api.gateway import Gateway
from rackserve.api.http import create_app
from rackserve.api.limits import Limits
from rackserve.api.metrics import Metrics
from rackserve.api.state import ServerState
from rackserve.base.ids import FRONTEND
from rackserve.base.keys import CacheNamespace
from rackserve.base.messages import Cancel, Message, Output, Submit
from rackserve.base.request import Request, Usage
from rackserve.base.step import TokenLogprobs
from rackserve.text.chat import ChatTemplate
from rackserve.text.tokenizer import unpack
from tests.text.small_model import CHATML, EOS, byte_ids, small_tokenizer

NAMESPACE = CacheNamespace("tiny", "r1", 4, "dense")
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it must end within seconds."""
    return asyncio.run(asyncio.wait_for(work, 20))


class Script(msgspec.Struct, frozen=True):
    """What the rack answers: `ids` in groups, then `finish` or `error`; with `hold` it goes silent after `ids` until cancelled.

    `groups`: tokens per output, the last number repeated. `cached`: cached prompt tokens in the usage.
    """

    ids: tuple[int, ...] = ()
    groups: tuple[int, ...] = (1,)
    finish: str | None = "stop"
    error: str | None = None
    hold: bool = False
    cached: int = 0
    attempts: int = 1
    logprobs: bool = False


def text(answer: str, **settings: Any) -> Script:
    """A script that says `answer` one byte per token and ends with EOS."""
    return Script(ids=(*byte_ids(answer), EOS), **settings)


def cut(ids: Sequence[int], groups: Sequence[int]) -> list[tuple[int, ...]]:
    parts, at, number = [], 0, 0
    while at < len(ids):
        size = groups[min(number, len(groups) - 1)]
        parts.append(tuple(ids[at : at + size]))
        at, number = at + size, number + 1
    return parts


class ScriptedFrontend:
    """Node `frontend` and the transport to it. `script` is asked once per request."""

    def __init__(self, script: Callable[[Request], Script]) -> None:
        self.script = script
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.gateway = Gateway(self)
        self.held = asyncio.Event()
        self._plays: dict[str, asyncio.Task[None]] = {}
        self._sent: dict[str, int] = {}

    def send(self, to: str, message: Message) -> None:
        assert to == FRONTEND
        if isinstance(message, Submit):
            assert message.reply_to == "api"
            self.submitted.append(message.request)
            self._plays[message.request.id] = asyncio.create_task(self._play(message.request))
        else:
            assert isinstance(message, Cancel)
            self.cancelled.append(message.request)
            self._plays[message.request].cancel()
            request = next(r for r in self.submitted if r.id == message.request)
            count = self._sent.get(request.id, 0)
            last = Output(request.id, count, (), finish="cancelled", usage=self._usage(request, count))
            asyncio.get_running_loop().call_soon(self.gateway.handle, last)

    def _usage(self, request: Request, count: int) -> Usage:
        return Usage(request.num_tokens, self.script(request).cached, count)

    async def _play(self, request: Request) -> None:
        script = self.script(request)
        ids = script.ids[: request.max_tokens]
        finish = script.finish if ids == script.ids else "length"
        parts = cut(ids, script.groups)
        ends_inside = parts and script.error is None and not script.hold
        for number, part in enumerate(parts):
            await asyncio.sleep(0)
            index = self._sent.get(request.id, 0)
            self._sent[request.id] = index + len(part)
            output = Output(request.id, index, part, attempts=script.attempts, logprobs=self._logprobs(script, part))
            if script.logprobs and request.prompt_logprobs >= 0 and not index:
                scored = unpack(request.tokens)[1:]
                output = msgspec.structs.replace(output, prompt_logprobs=self._logprobs(script, scored))
            if ends_inside and number == len(parts) - 1:
                output = msgspec.structs.replace(output, finish=finish, usage=self._usage(request, len(ids)))
            self.gateway.handle(output)
        await asyncio.sleep(0)
        if script.hold:
            self.held.set()
        elif script.error is not None:
            self.gateway.handle(Output(request.id, len(ids), (), error=script.error, detail="scripted"))

    @staticmethod
    def _logprobs(script: Script, part: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
        return tuple(TokenLogprobs(-0.5, ((token, -0.5), (2, -2.0))) for token in part) if script.logprobs else ()


def factory(**settings: Any) -> RequestFactory:
    settings = {"max_model_len": 256, "models": ("tiny",), "template": ChatTemplate(CHATML), "secret": b"s", **settings}
    return RequestFactory(small_tokenizer(), NAMESPACE, **settings)


class Rig:
    """An application over a scripted frontend. Make it inside a running loop."""

    def __init__(self, script: Script | Callable[[Request], Script], *, limits: Limits | None = None, **settings: Any) -> None:
        self.frontend = ScriptedFrontend(script if callable(script) else lambda _: script)
        self.gateway = self.frontend.gateway
        self.metrics = Metrics()
        self.state = ServerState(ready=True)
        self.factory = factory(limits=limits, **settings)
        self.app = create_app(self.gateway, self.factory, self.metrics, self.state)

    async def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://rig") as client:
            return await client.request(method, path, **arguments)

    async def post(self, path: str, body: object = None, *, raw: bytes | None = None, headers: Any = None) -> httpx.Response:
        return await self.request("POST", path, content=msgspec.json.encode(body) if raw is None else raw, headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"no series {name} {labels}"
        return value

    @asynccontextmanager
    async def raw(self, path: str, body: object) -> AsyncIterator[RawClient]:
        client = RawClient()
        task = asyncio.create_task(self.app(client.scope(path), client.feed(msgspec.json.encode(body)), client.take))
        try:
            yield client
        finally:
            client.gone.set()
            await task


class RawClient:
    """An ASGI client that reads the response bytes as they come and can hang up."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.body = b""
        self.grown = asyncio.Event()
        self.ended = asyncio.Event()

    @staticmethod
    def scope(path: str) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
            "scheme": "http",
            "root_path": "",
        }

    def feed(self, body: bytes) -> Callable[[], Coroutine[Any, Any, dict[str, Any]]]:
        parts = [body]

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        return receive

    async def take(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status.set_result(message["status"])
            return
        self.body += message["body"]
        self.grown.set()
        if not message.get("more_body", False):
            self.ended.set()

    async def read_until(self, part: bytes) -> None:
        while part not in self.body:
            self.grown.clear()
            await self.grown.wait()


def events(raw: bytes) -> list[Any]:
    """The server-sent events in `raw`, which must hold nothing else; `[DONE]` as the string."""
    assert raw.endswith(b"\n\n")
    lines = raw[:-2].split(b"\n\n")
    assert all(line.startswith(b"data: ") and b"\n" not in line and b"\r" not in line for line in lines), lines
    return [line[6:].decode() if line == b"data: [DONE]" else msgspec.json.decode(line[6:]) for line in lines]


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream, of either kind."""
    own = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in own)


def finishes(chunks: list[Any], index: int = 0) -> list[str]:
    """Every finish_reason that choice `index` got."""
    own = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in own if choice["finish_reason"] is not None]
