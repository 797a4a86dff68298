"""A request on its way: a place, a worker's answer, another try if there was none, and the end of what was booked."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, aclosing, suppress

from starlette.types import Receive, Scope, Send

from rackserve.api.errors import INTERNAL, failure
from rackserve.api.exchange import ClientGone
from rackserve.api.limits import Limits
from rackserve.base.errors import RequestError
from rackserve.base.ids import Rank
from rackserve.relay.passage import Passage
from rackserve.relay.placer import Booking
from rackserve.relay.relay import Relay
from rackserve.relay.upstream import RawHeaders, WorkerAnswer, WorkerFailed
from rackserve.relay.usage import Ends

_log = logging.getLogger("rackserve.route")

ELSEWHERE = frozenset({429, 502, 503, 504})
"""Statuses by which a worker says that it cannot now: another may."""


class Unanswered(Exception):
    """A try ended without a byte for the client, through `worker`. If no other is made the client is told `answer`, what the
    worker itself said (status, headers, body), or else `error`. `dead`: nobody listens there, which goes for all requests.
    """

    def __init__(
        self,
        worker: str,
        kind: str,
        detail: str,
        answer: tuple[int, RawHeaders, bytes] | None = None,
        *,
        dead: bool = False,
    ) -> None:
        super().__init__(detail)
        self.dead = dead
        self.worker = worker
        self.kind = kind
        self.answer = answer
        self.error = RequestError(f"worker {worker}: {detail}", code="unavailable", status=503)


class Broken(Exception):
    """An answer broke off after the client had got its beginning."""


def outcome_of(status: int) -> str:
    """What an answer of this status that came whole is counted as."""
    return "failed" if status >= 500 else "worker_refused" if status >= 400 else "finished"


class Forward:
    """An ASGI application for one path whose answers come from whole workers. Subclasses ask pairs of them."""

    def __init__(self, relay: Relay, path: str) -> None:
        self._relay = relay
        self._path = path
        self._limits = Limits(body_bytes=relay.config.body_bytes, send_s=relay.config.waits.gap)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        passage, relay = Passage(scope, receive, send, self._limits), self._relay
        outcome = "refused"
        try:
            relay.arrive()
        except RequestError as error:
            relay.metrics.requests.labels(outcome).inc()
            await passage.refuse(error)
            return
        try:
            outcome = await self._serve(passage)
        except ClientGone:
            outcome = "hung_up"
        except asyncio.CancelledError:  # the client's own limit has passed
            outcome = "failed"
            raise
        except RequestError as error:
            with suppress(ClientGone):
                await passage.refuse(error)
        except Broken as error:
            outcome = "failed"
            _log.warning("%s", error)
            with suppress(ClientGone):
                await passage.break_off(RequestError(str(error), code="worker_lost", status=502))
        except Exception:
            outcome = "failed"
            _log.exception("a request failed")
            with suppress(ClientGone):
                await (passage.break_off if passage.started else passage.refuse)(INTERNAL)
        finally:
            relay.depart()
            relay.metrics.requests.labels(outcome).inc()

    async def _serve(self, passage: Passage) -> str:
        """Answer, or raise ClientGone as soon as the client hangs up, with everything started for it ended."""
        relay, arrived = self._relay, asyncio.get_running_loop().time()
        raw = relay.salted(self._path, await passage.body(), passage.caller)
        answer = asyncio.create_task(self._answer(passage, raw, arrived))
        relay.answers.add(answer)
        hang_up = asyncio.create_task(passage.hang_up())
        try:
            await asyncio.wait((answer, hang_up), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientGone
            if answer.cancelled():  # the router ends
                raise Broken(relay.closed) if passage.started else failure("draining", relay.closed)
            return answer.result()
        finally:
            relay.answers.discard(answer)
            answer.cancel()
            hang_up.cancel()
            await asyncio.gather(answer, hang_up, return_exceptions=True)

    async def _answer(self, passage: Passage, raw: bytes, arrived: float) -> str:
        relay, waits = self._relay, self._relay.config.waits
        call = await relay.read(self._path, raw, passage.headers)
        tried: list[str] = []
        try:
            async with asyncio.timeout(waits.total):
                while True:
                    booking = await relay.place(call, tried, passage.dp_rank)
                    if not tried:
                        relay.metrics.placing.observe(asyncio.get_running_loop().time() - arrived)
                    try:
                        await self.attempt(passage, raw, booking, arrived)
                        return outcome_of(passage.status)
                    except Unanswered as refused:
                        tried.append(refused.worker)
                        if not self.blame(refused, len(tried)):
                            await self.give_up(passage, refused)
                            return "failed"
                    finally:
                        relay.release(booking)
        except TimeoutError:
            text = f"the answer was not complete within {waits.total:g} seconds"
            if passage.started:
                raise Broken(text) from None
            raise RequestError(text, code="timeout", status=504) from None

    def blame(self, refused: Unanswered, tries: int) -> bool:
        """Count a refused against its worker. True if another try may be made after so many."""
        self._relay.failed(refused.worker, refused.kind, dead=refused.dead, counts=refused.kind != "status_429")
        if tries >= self._relay.config.retries.attempts:
            return False
        if not self._relay.budget.spend():
            self._relay.metrics.retries_denied.inc()
            return False
        self._relay.metrics.retries.inc()
        return True

    async def give_up(self, passage: Passage, refused: Unanswered) -> None:
        """Tell the client of a refused after which nothing is tried any more."""
        if refused.answer is None:
            raise refused.error from refused
        await passage.send_whole(*refused.answer)

    async def attempt(self, passage: Passage, raw: bytes, booking: Booking, arrived: float) -> None:
        """One try on the place booked. Raises Unanswered or Broken."""
        async with AsyncExitStack() as stack:
            answer = await self.ask(stack, passage, booking.rank, raw)
            await self.pass_answer(passage, booking, answer, booking.rank.worker, arrived)

    async def ask(self, stack: AsyncExitStack, passage: Passage, rank: Rank, body: bytes) -> WorkerAnswer:
        """Send `body` to `rank`; its answer, which stays open as long as `stack`. Raises Unanswered."""
        relay, waits = self._relay, self._relay.config.waits
        worker = relay.fleet.worker_of(rank)
        headers = passage.passed_headers(rank.dp_rank if worker.config.dp_ranks > 1 else None, relay.door)
        relay.metrics.sent.labels(worker.name).inc()
        try:
            answer = await stack.enter_async_context(
                relay.upstream.send(worker, "POST", self._path, headers, body, head_s=waits.head, gap_s=waits.gap)
            )
            if answer.status in ELSEWHERE:
                said = answer.status, answer.headers, await answer.whole()
                raise Unanswered(worker.name, f"status_{answer.status}", f"HTTP {answer.status}", said)
        except WorkerFailed as error:
            raise Unanswered(worker.name, "no_answer", str(error), dead=error.refused) from error
        return answer

    async def pass_answer(self, passage: Passage, booking: Booking, answer: WorkerAnswer, worker: str, arrived: float) -> None:
        """Pass an answer on to its end. Raises Broken."""
        relay, ends = self._relay, Ends()
        relay.fleet.by_name(worker).breaker.succeeded()
        relay.metrics.first_byte.observe(asyncio.get_running_loop().time() - arrived)
        if answer.status < 300:
            relay.computed(booking)
        await passage.begin(answer.status, answer.headers)
        try:
            async with aclosing(answer.all_pieces()) as pieces:
                async for piece in pieces:
                    ends.add(piece)
                    await passage.pass_on(piece)
        except WorkerFailed as error:
            relay.failed(worker, "broken_off", dead=False, counts=True)
            raise Broken(f"worker {worker} broke off: {error}") from error
        await passage.end()
        relay.told(booking, ends.usage)
