"""The generation endpoints: one path for all dialects, streamed or not."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from rackserve.api.answer import Delta, choice, merge
from rackserve.api.ask import Ask
from rackserve.api.call import Call, Caller
from rackserve.api.desk import Desk
from rackserve.api.dialects.dialect import Dialect, Reply
from rackserve.api.errors import error_headers, failure
from rackserve.api.exchange import ClientGone, Exchange
from rackserve.api.factory import RequestFactory
from rackserve.api.gateway import Gateway
from rackserve.api.metrics import Metrics
from rackserve.api.state import ServerState
from rackserve.base.errors import RequestError

_log = logging.getLogger("rackserve.api")

_INTERNAL = RequestError("internal error; see the server's log", code="internal", status=500)


class GenerationEndpoint:
    """An ASGI application for one dialect. Cancels whatever still runs when its client hangs up."""

    def __init__(
        self, gateway: Gateway, factory: RequestFactory, desk: Desk, metrics: Metrics, state: ServerState, dialect: Dialect
    ) -> None:
        self._gateway = gateway
        self._factory = factory
        self._desk = desk
        self._metrics = metrics
        self._state = state
        self._dialect = dialect

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
                await self._fail(exchange, _INTERNAL)
        except ClientGone:
            self._metrics.client_gone()

    async def _fail(self, exchange: Exchange, error: RequestError, reply: Reply | None = None) -> None:
        """Tell `error`: as an HTTP error before the first byte, in the dialect's own way inside the stream after it."""
        self._metrics.error_sent("stream" if exchange.started else str(error.status))
        if not exchange.started:
            await exchange.reply(self._dialect.error_body(error), status=error.status, headers=error_headers(error))
            return
        assert reply is not None, "a stream began before the request was read"
        for event in reply.failure(error):
            await exchange.send_event(event)
        await exchange.end_stream()

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
        call = await self._desk.prepare(raw, exchange.headers, self._dialect, Caller())
        del raw  # may be megabytes, and the answer may take minutes
        self._note(call.ask, call.clamped)
        reply = self._dialect.reply(call)
        try:
            await self._generate(exchange, call, reply)
        except RequestError as error:
            await self._fail(exchange, error, reply)
        except ClientGone:
            raise
        except Exception:
            _log.exception("a request failed")
            await self._fail(exchange, _INTERNAL, reply)

    async def _generate(self, exchange: Exchange, call: Call, reply: Reply) -> None:
        choices = [
            choice(self._gateway, self._factory.tokenizer, call, index, self._metrics.tokens_arrived)
            for index in range(len(call.requests))
        ]
        async with aclosing(merge(choices)) as deltas:
            if not call.ask.stream:
                gathered: list[Delta] = [delta async for delta in deltas]
                await exchange.reply(reply.body(gathered))
                return
            async for delta in deltas:
                for event in reply.events(delta):
                    await exchange.send_event(event)
        for event in reply.closing():
            await exchange.send_event(event)
        await exchange.end_stream()

    def _note(self, ask: Ask, clamped: int) -> None:
        if clamped:
            self._metrics.output_clamped(clamped)
        for name in ask.unknown:
            if self._metrics.unknown_field(name):
                _log.warning("unknown request field %r has no effect", name[:60])
