"""The endpoints behind which requests are made: what all of them hold to, and the one that generates."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from rackserve.api.answer import Delta, choice, merge
from rackserve.api.ask import Ask
from rackserve.api.call import Call
from rackserve.api.desk import Desk
from rackserve.api.dialects.dialect import Dialect, Reply
from rackserve.api.errors import INTERNAL, error_headers, failure
from rackserve.api.exchange import ClientGone, Exchange
from rackserve.api.factory import RequestFactory
from rackserve.api.gateway import Gateway
from rackserve.api.journal import Witness
from rackserve.api.metrics import Metrics
from rackserve.api.refusals import body_for
from rackserve.api.state import ServerState
from rackserve.base.errors import RequestError

T = TypeVar("T")

_log = logging.getLogger("rackserve.api")

IGNORED = "x-rackserve-ignored"
"""Header of an answer: what of the request had no effect, such as tools of kinds that only other servers have, and fields that
nobody knows."""

MAX_TOLD = 1024
MAX_UNKNOWN = 16
MAX_NAME = 60


@dataclass(frozen=True, slots=True)
class Service:
    """What endpoints work with."""

    gateway: Gateway
    factory: RequestFactory
    desk: Desk
    metrics: Metrics
    state: ServerState
    witnesses: tuple[Witness, ...] = ()


class Endpoint(ABC):
    """An ASGI application for one path. Cancels whatever still runs when its client hangs up; every error is told once."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    async def answer(self, exchange: Exchange, raw: bytes) -> None:
        """Answer the body in `raw`. Cancelled when the client hangs up."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.service.factory.limits)
        try:
            try:
                await self._serve(exchange)
            except RequestError as error:
                await self.fail(exchange, error)
            except ClientGone:
                raise
            except Exception:
                _log.exception("a request failed")
                await self.fail(exchange, INTERNAL)
        except ClientGone:
            self.service.metrics.client_gone()

    async def fail(self, exchange: Exchange, error: RequestError, reply: Reply | None = None) -> None:
        """Tell `error`: as an HTTP error before the first byte, in the dialect's own way inside the stream after it."""
        if not exchange.started:
            await exchange.reply(body_for(exchange.path, error), status=error.status, headers=error_headers(error))
            return
        self.service.metrics.error_sent("stream")
        assert reply is not None, "a stream began before the request was read"
        await exchange.send_events(reply.failure(error), last=True)

    async def read(self, work: Callable[[], T]) -> T:
        """What `work` makes of a body, off the event loop. Raises RequestError for one that is nested too deeply for it."""
        try:
            return await self.service.desk.run(work)
        except RecursionError as error:
            raise RequestError("the body is nested too deeply", code="invalid_json") from error

    async def _serve(self, exchange: Exchange) -> None:
        """Answer, or raise ClientGone once the client hangs up or takes nothing, with everything started for it cancelled."""
        state = self.service.state
        if not state.takes_work:
            code = "draining" if state.draining else "unavailable"
            raise failure(code, "the server is shutting down" if state.draining else "the server is not ready yet")
        answer = asyncio.create_task(self.answer(exchange, await exchange.body()))
        hang_up = asyncio.create_task(exchange.hang_up())
        try:
            while not answer.done():
                patience = exchange.patience()
                if hang_up.done() or patience <= 0:
                    raise ClientGone
                await asyncio.wait((answer, hang_up), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            answer.result()
        finally:
            answer.cancel()
            hang_up.cancel()
            await asyncio.gather(answer, hang_up, return_exceptions=True)


class GenerationEndpoint(Endpoint):
    """Generates, in one dialect, streamed or not."""

    def __init__(self, service: Service, dialect: Dialect) -> None:
        super().__init__(service)
        self._dialect = dialect

    async def answer(self, exchange: Exchange, raw: bytes) -> None:
        call = await self._prepare(exchange, raw)
        del raw  # may be megabytes, and the answer may take minutes
        for witness in self.service.witnesses:
            witness.begin(call, exchange.caller, exchange.headers)
        self._note(call.ask, call)
        if call.ask.ignored or call.ask.unknown:
            exchange.notes[IGNORED] = without_effect(call.ask)
        reply = self._dialect.reply(call)
        try:
            await self._generate(exchange, call, reply)
        except RequestError as error:
            await self.fail(exchange, error, reply)
        except ClientGone:
            raise
        except Exception:
            _log.exception("a request failed")
            await self.fail(exchange, INTERNAL, reply)

    async def _prepare(self, exchange: Exchange, raw: bytes) -> Call:
        factory, headers = self.service.factory, dict(exchange.headers)
        caller = exchange.caller
        return await self.read(lambda: factory.prepare(self._dialect.parse(raw, headers), caller))

    async def _generate(self, exchange: Exchange, call: Call, reply: Reply) -> None:
        gateway, tokenizer, gap = self.service.gateway, self.service.factory.tokenizer, self.service.metrics.tokens_arrived
        choices = [choice(gateway, tokenizer, call, index, gap) for index in range(len(call.requests))]
        async with aclosing(merge(choices)) as deltas:
            if not call.ask.stream:
                gathered: list[Delta] = [delta async for delta in deltas]
                await exchange.reply(reply.body(gathered))
                return
            async for delta in deltas:
                events = reply.events(delta)
                if events:
                    await exchange.send_events(events)
        await exchange.send_events(reply.closing(), last=True)

    def _note(self, ask: Ask, call: Call) -> None:
        metrics = self.service.metrics
        if call.clamped:
            metrics.output_clamped(call.clamped)
        for position in call.left_at[:: ask.n]:
            if position is not None:
                metrics.prompt_left(position)
        for name in ask.unknown:
            if metrics.unknown_field(name):
                _log.warning("unknown request field %r has no effect", name[:MAX_NAME])


def without_effect(ask: Ask) -> str:
    """What of `ask` had no effect, as the value of a header, whatever characters a client put into it: what is known first.

    A part of a field is not named beside the whole. Of fields that nobody knows at most MAX_UNKNOWN are.
    """
    known = [name for name in dict.fromkeys(ask.ignored) if name.rpartition(".")[0] not in ask.ignored]
    unknown = [name[:MAX_NAME].replace(",", "?") for name in ask.unknown[:MAX_UNKNOWN]]
    text = ", ".join([*known, *unknown]).encode("ascii", "replace").decode()
    return "".join(character if character.isprintable() else "?" for character in text)[:MAX_TOLD]
