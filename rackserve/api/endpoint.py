"""/v1/completions and /v1/chat/completions: one path for both, streamed or not."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import msgspec
from starlette.types import Receive, Scope, Send

from rackserve.api.answer import Delta, choice, merge
from rackserve.api.desk import Desk
from rackserve.api.errors import failure
from rackserve.api.exchange import ClientGone, Exchange
from rackserve.api.factory import Call, RequestFactory
from rackserve.api.gateway import Gateway
from rackserve.api.metrics import Metrics
from rackserve.api.replies import Reply
from rackserve.api.state import ServerState
from rackserve.base.errors import RequestError

_log = logging.getLogger("rackserve.api")


class GenerationEndpoint:
    """An ASGI application for one of the two paths. Cancels whatever still runs when its client hangs up."""

    def __init__(
        self, gateway: Gateway, factory: RequestFactory, desk: Desk, metrics: Metrics, state: ServerState, *, chat: bool
    ) -> None:
        self._gateway = gateway
        self._factory = factory
        self._desk = desk
        self._metrics = metrics
        self._state = state
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._factory.limits)
        try:
            try:
                await self._serve(exchange)
            except RequestError as error:
                await self._fail(exchange, error)
            except ClientGone:
                raise
            except Exception:
                _log.exception("a request failed")
                await self._fail(exchange, RequestError("internal error; see the server's log", code="internal", status=500))
        except ClientGone:
            self._metrics.client_gone()

    async def _fail(self, exchange: Exchange, error: RequestError) -> None:
        self._metrics.error_sent("stream" if exchange.started else str(error.status))
        await exchange.fail(error)

    async def _serve(self, exchange: Exchange) -> None:
        """Answer, or raise ClientGone as soon as the client hangs up, with everything started for it cancelled."""
        if not self._state.takes_work:
            code = "draining" if self._state.draining else "unavailable"
            raise failure(code, "the server is shutting down" if self._state.draining else "the server is not ready yet")
        raw = await exchange.body()
        answer = asyncio.create_task(self._answer(exchange, raw))
        hang_up = asyncio.create_task(exchange.hang_up())
        try:
            await asyncio.wait((answer, hang_up), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientGone
            answer.result()
        finally:
            answer.cancel()
            hang_up.cancel()
            await asyncio.gather(answer, hang_up, return_exceptions=True)

    async def _answer(self, exchange: Exchange, raw: bytes) -> None:
        call = await self._desk.prepare(raw, exchange.headers, chat=self._chat)
        del raw  # may be megabytes, and the answer may take minutes
        self._note(call)
        choices = [
            choice(self._gateway, self._factory.tokenizer, call, index, self._metrics.tokens_arrived)
            for index in range(len(call.requests))
        ]
        reply = Reply(call)
        async with aclosing(merge(choices)) as deltas:
            if not call.stream:
                gathered: list[Delta] = [delta async for delta in deltas]
                await exchange.reply(msgspec.json.encode(reply.body(gathered)))
                return
            async for delta in deltas:
                for chunk in reply.chunks(delta):
                    await exchange.send_json_event(chunk)
        if call.include_usage:
            await exchange.send_json_event(reply.usage_chunk())
        await exchange.send_event(b"[DONE]")
        await exchange.end_stream()

    def _note(self, call: Call) -> None:
        if call.clamped:
            self._metrics.output_clamped(call.clamped)
        for name in call.unknown:
            if self._metrics.unknown_field(name):
                _log.warning("unknown request field %r has no effect", name[:60])
