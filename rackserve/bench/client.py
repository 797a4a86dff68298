"""Replays sessions over HTTP against any OpenAI-compatible endpoint. Streams, trusts the server's counts, waits for nothing
without a deadline, and turns every failure into a record with its kind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Literal

import httpx
import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.request import Request
from rackserve.base.units import NS_PER_S, Time, to_ns
from rackserve.bench.ideal import IdealCache
from rackserve.bench.plan import Plan, Send
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.records import OpenRecord, RequestRecord
from rackserve.bench.tally import Tally
from rackserve.bench.wire import LeanTransport
from rackserve.bench.words import word_of

EndpointKind = Literal["completions-tokens", "completions", "chat"]


class Target(msgspec.Struct, frozen=True):
    """Where to send requests and how long to wait.

    url                 server address, with or without /v1
    endpoint            completions-tokens: prompt is a list of token ids; completions: text; chat: one user message
    request_deadline_s  limit of one request, from its sending to its last byte
    run_deadline_s      when the run ends after its warming up, whatever is in flight; 0 = when the plan is done
    max_connections     requests in flight at once, 0 = as many as the plan wants
    headers             sent with every request
    dp_ranks            > 0: the server has so many data-parallel ranks; each session tree is pinned to one of them, in turn, by
                        the header X-data-parallel-rank
    """

    url: str
    model: str
    endpoint: EndpointKind = "completions-tokens"
    api_key: str = ""
    request_deadline_s: float = 600.0
    run_deadline_s: float = 0.0
    max_connections: int = 0
    headers: Mapping[str, str] = {}
    dp_ranks: int = 0

    def __post_init__(self) -> None:
        if self.endpoint not in ("completions-tokens", "completions", "chat"):
            raise ConfigError(f"endpoint must be completions-tokens, completions or chat, got {self.endpoint!r}")
        if self.request_deadline_s <= 0 or min(self.run_deadline_s, self.max_connections, self.dp_ranks) < 0:
            raise ConfigError("request_deadline_s must be above 0; run_deadline_s, max_connections and dp_ranks at least 0")

    @property
    def path(self) -> str:
        """The full address requests are posted to."""
        root = self.url.rstrip("/").removesuffix("/v1")
        return f"{root}/v1/chat/completions" if self.endpoint == "chat" else f"{root}/v1/completions"


class _Failure(Exception):
    """A request failed as `kind`."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""Tokens that a server says it used: other numbers are a bad response, not a fast server."""


class _Details(msgspec.Struct):
    cached_tokens: Count | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: Count
    completion_tokens: Count = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        delta = self.delta
        inside = delta is not None and bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
        return inside or bool(self.text or self.token_ids)


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None

    @property
    def kind(self) -> str:
        name = str(self.code or self.type or "server_error")
        overflow = "context_length" in name or "context length" in self.message.lower()
        return "context_overflow" if overflow else name


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Words(dict[int, str]):
    """The text that stands for each token id."""

    def __missing__(self, token: int) -> str:
        return self.setdefault(token, word_of(token))


_words = _Words()
_decoder = msgspec.json.Decoder(_Chunk)
_encoder = msgspec.json.Encoder()


def request_body(target: Target, request: Request) -> bytes:
    """The JSON body of a request: streaming, usage included, output length forced."""
    ids = memoryview(request.tokens).cast("i")
    body: dict[str, object] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.max_tokens,
        "temperature": request.sampling.temperature,
        "ignore_eos": request.ignore_eos,
    }
    if target.endpoint == "completions-tokens":
        body["prompt"] = ids.tolist()
    else:
        text = "".join(map(_words.__getitem__, ids))  # equal tokens give equal text, so shared prefixes stay shared
        body |= {"prompt": text} if target.endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}
    return _encoder.encode(body)


async def _lines(response: httpx.Response, now: Callable[[], Time]) -> AsyncIterator[tuple[Time, bytes]]:
    """(when it arrived, line) of an answer; a line is stamped with its last byte."""
    arrived, rest, at = response.extensions.get("arrived_ns", now), b"", now()
    async for piece in response.aiter_raw():
        at = arrived()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield at, line
    if rest:
        yield at, rest


async def _events(response: httpx.Response, now: Callable[[], Time]) -> AsyncIterator[tuple[Time, _Chunk]]:
    """Chunks of a server-sent event stream up to [DONE], with the times at which they arrived."""
    done = False
    async for at, line in _lines(response, now):
        if done or not line.startswith(b"data:"):
            continue  # after [DONE] only the end of the stream is left, which frees the connection
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        try:
            yield at, _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise _Failure("bad_response", f"{error} in {data[:200].decode(errors='replace')}") from None


async def _read(response: httpx.Response, record: OpenRecord, now: Callable[[], Time]) -> _Usage:
    """Read the whole answer into `record`; its usage. Anything but a complete answer raises `_Failure`."""
    if response.status_code >= 400:
        raw = await response.aread()
        with contextlib.suppress(msgspec.MsgspecError):
            error = _decoder.decode(raw).error
            if error is not None:
                kind = error.kind if error.kind == "context_overflow" else f"http_{response.status_code}"
                raise _Failure(kind, error.message)
        raise _Failure(f"http_{response.status_code}", raw[:200].decode(errors="replace"))
    usage, finished = None, False
    async for at, chunk in _events(response, now):
        if chunk.error is not None:
            raise _Failure(chunk.error.kind, chunk.error.message)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finished = finished or choice.finish_reason is not None
            if choice.has_output:
                record.add_chunk(at, None if choice.token_ids is None else len(choice.token_ids))
    if not finished:
        raise _Failure("incomplete", "the stream ended without a finish_reason")
    if usage is None:
        raise _Failure("no_usage", "the stream has no usage block; the server must support stream_options.include_usage")
    return usage


class HttpReplay:
    """One run of a plan against `target` with an open `client`. `records` grows as requests end."""

    def __init__(
        self,
        plan: Plan,
        maker: RequestMaker,
        ideal: IdealCache,
        target: Target,
        client: httpx.AsyncClient,
        tally: Tally,
        now: Callable[[], Time] = time.monotonic_ns,
        interrupt: asyncio.Event | None = None,
    ) -> None:
        self._plan = plan
        self._interrupt = interrupt or asyncio.Event()
        self._tally = tally
        self._maker = maker
        self._ideal = ideal
        self._target = target
        self._client = client
        self._now = now
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[str, tuple[Send, OpenRecord]] = {}
        self._ended = asyncio.Event()
        self._slots = asyncio.Semaphore(target.max_connections or 1 << 30)
        self._dp_ranks: dict[str, int] = {}
        self.records: list[RequestRecord] = []

    async def run(self) -> list[RequestRecord]:
        """Replay until the plan is done, its deadline or `interrupt`; what is then in flight is recorded as unfinished."""
        beside = [asyncio.create_task(self._tally.watch_lag()), asyncio.create_task(self._watch_interrupt())]
        try:
            await self._until_done()
        finally:
            for task in beside:
                task.cancel()
        self._plan.stop(self._now())
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *beside, return_exceptions=True)
        for send, record in list(self._open.values()):
            self._close(send, record, None, _Failure("unfinished", "the run ended first"))
        return self.records

    async def _watch_interrupt(self) -> None:
        await self._interrupt.wait()
        self._ended.set()

    async def _until_done(self) -> None:
        self._plan.start(self._now())
        while not (self._plan.done or self._interrupt.is_set()):
            measured_ns, limit = self._plan.measured_from_ns, None
            if self._target.run_deadline_s and measured_ns is not None:
                limit = measured_ns + to_ns(self._target.run_deadline_s)
                if self._now() >= limit:
                    return
            self._ended.clear()
            for send in self._plan.take_due(self._now()):
                request = self._maker.make(send)
                record = OpenRecord(send, request, self._ideal, self._now())
                self._open[request.id] = (send, record)
                self._tally.sent += 1
                task = asyncio.create_task(self._one(send, request, record))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            due = min((at for at in (self._plan.next_due, limit) if at is not None), default=None)
            wait_s = None if due is None else max(0, due - self._now() + 1) / NS_PER_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ended.wait()

    async def _one(self, send: Send, request: Request, record: OpenRecord) -> None:
        usage, failure = None, _Failure("")
        try:
            async with self._slots:
                usage = await self._post(send, request, record)
        except _Failure as error:
            failure = error
        except TimeoutError:
            failure = _Failure("timeout", f"no complete answer within {self._target.request_deadline_s} s")
        except httpx.ConnectError as error:
            failure = _Failure("connect", str(error))
        except (httpx.HTTPError, httpx.StreamError) as error:
            failure = _Failure("transport", f"{type(error).__name__}: {error}")
        except Exception as error:  # whatever one request runs into, the run must end with all records
            failure = _Failure("client_error", f"{type(error).__name__}: {error}")
        self._close(send, record, usage, failure)

    async def _post(self, send: Send, request: Request, record: OpenRecord) -> _Usage:
        tree, ranks = send.key.tree, self._target.dp_ranks
        headers = {"content-type": "application/json", "accept-encoding": "identity", "x-session-id": request.session}
        headers |= {"x-request-id": request.id, **self._target.headers}
        if self._target.api_key:
            headers["authorization"] = f"Bearer {self._target.api_key}"
        if ranks:
            headers["x-data-parallel-rank"] = str(self._dp_ranks.setdefault(tree, len(self._dp_ranks) % ranks))
        body = request_body(self._target, request)
        async with asyncio.timeout(self._target.request_deadline_s):
            record.sent_ns = self._now()
            async with self._client.stream("POST", self._target.path, content=body, headers=headers) as response:
                return await _read(response, record, self._now)

    def _close(self, send: Send, record: OpenRecord, usage: _Usage | None, failure: _Failure) -> None:
        now = self._now()
        del self._open[str(send.key)]
        if usage is None:
            closed = record.close(now, error=failure.kind, detail=str(failure))
            self._plan.on_failed(send.key, now)
        else:
            details = usage.prompt_tokens_details
            closed = record.close(
                now,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=(details.cached_tokens or 0) if details else 0,
                output_tokens=usage.completion_tokens,
            )
            self._plan.on_finished(send.key, now)
        self.records.append(closed)
        self._tally.close(closed)
        self._ended.set()


async def replay_over_http(
    plan: Plan,
    maker: RequestMaker,
    ideal: IdealCache,
    target: Target,
    *,
    tally: Tally | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    now: Callable[[], Time] = time.monotonic_ns,
    interrupt: asyncio.Event | None = None,
) -> list[RequestRecord]:
    """Replay `plan` against `target`; one record per request sent. `tally` is kept up to date meanwhile.

    Once `interrupt` is set nothing more is sent, and what is in flight is cut off and recorded as unfinished.
    """
    async with httpx.AsyncClient(transport=transport or LeanTransport(now), timeout=None, trust_env=False) as client:
        return await HttpReplay(plan, maker, ideal, target, client, tally or Tally(), now, interrupt).run()
