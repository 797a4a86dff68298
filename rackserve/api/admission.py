"""What holds for every call once it is let in: how many a tenant may have open, how long it may last, when to come again."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rackserve.api.call import Caller
from rackserve.api.errors import RETRY_AFTER_S, error_headers, failure
from rackserve.api.health import knows
from rackserve.api.refusals import body_for, head_of, last_event
from rackserve.base.errors import RequestError

DEADLINE = "x-request-timeout"
"""Header in which a client says how many seconds a call may last in all."""

MAX_DEADLINE_S = 86_400.0
MAX_RETRY_AFTER_S = 60

GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Paths of calls that need a place on a rank."""

MOST_READ_OFF = 64 << 20
READ_OFF_S = 10.0
"""Of the body of a call that is refused unread, so many bytes and so long are waited for."""

KEPT_ENDS = 64
"""Calls whose ends make the measured rate."""


class Admission:
    """Wraps the application, within the guard: counts POST calls by the tenant that the guard has put into the scope.

    tenant_requests  open calls of one tenant; more are refused with 429 before their body is read
    clock            seconds, rising
    count            told "stream" of each stream that ends at its deadline
    is_full          whether the rack would refuse any call that generates; such calls are then refused with 429 unread
    """

    def __init__(
        self,
        app: ASGIApp,
        tenant_requests: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        count: Callable[[str], None] = lambda where: None,
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._count = count
        self._is_full = is_full
        self._tenant_requests = tenant_requests
        self._clock = clock
        self._open: Counter[str | None] = Counter()
        self._ends: deque[float] = deque(maxlen=KEPT_ENDS)

    @property
    def num_open(self) -> int:
        """Calls that have not ended, of all tenants."""
        return self._open.total()

    def retry_after(self) -> int:
        """Seconds that the open calls take at the rate at which calls have ended of late, within bounds."""
        if len(self._ends) < 2:
            return RETRY_AFTER_S
        seconds = self.num_open * (self._clock() - self._ends[0]) / len(self._ends)
        return min(max(math.ceil(seconds), RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        out = _Out(send, self.retry_after)
        caller: Caller = scope.get("caller") or Caller()
        whose = caller.tenant if caller.tenant or knows(scope) else None  # strangers, who may sign in, take no tenant's places
        try:
            seconds = _deadline(Headers(scope=scope))
            if self._open[whose] >= self._tenant_requests:
                text = f"{self._tenant_requests} requests of this tenant are open (limits.tenant_requests)"
                raise failure("overloaded", text)
            if scope["path"] in GENERATING and self._is_full():
                text = "the queues of all prefill ranks are full (router.max_queued_requests_per_rank and ..._tokens_per_rank)"
                raise failure("overloaded", text)
        except RequestError as error:
            await out.fail(scope, error, receive)
            return
        self._open[whose] += 1
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._app(scope, receive, out)
        except TimeoutError:
            if not limit.expired():
                raise
            if out.status:
                self._count("stream")
            await out.fail(scope, failure("timeout", f"the call lasted longer than its {DEADLINE}, {seconds:g} seconds"))
        finally:
            self._open[whose] -= 1
            if not self._open[whose]:
                del self._open[whose]
            if out.status == 200:
                self._ends.append(self._clock())


class _Out:
    """The way back to the client: knows how far the response is, and puts the measured wait into refusals for load."""

    def __init__(self, send: Send, retry_after: Callable[[], int]) -> None:
        self.status = 0
        self._send = send
        self._retry_after = retry_after
        self._streams = False
        self._ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=list(message["headers"]))
            if self.status == 429:
                headers["retry-after"] = str(self._retry_after())
            self._streams = headers.get("content-type", "").startswith("text/event-stream")
            message = {**message, "headers": headers.raw}
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, scope: Scope, error: RequestError, unread: Receive | None = None) -> None:
        """Tell `error` as far as the response still can: as a status, or as the last event of a stream.

        A body that is still unread is read to its end, as far as it goes, after the client has been told: a connection that is
        closed under somebody who sends looks broken to him, and what he was told is lost.
        """
        if not self.status:
            body = body_for(scope["path"], error)
            await self(head_of(error.status, {**error_headers(error), "connection": "close"}, body))
        elif self._streams and not self._ended:
            body = last_event(scope["path"], error)
        else:
            return
        await self({"type": "http.response.body", "body": body, "more_body": unread is not None})
        if unread is not None:
            await _read_off(unread)
            await self({"type": "http.response.body", "body": b""})


async def _read_off(receive: Receive) -> None:
    left, more = MOST_READ_OFF, True
    with suppress(TimeoutError):
        async with asyncio.timeout(READ_OFF_S):
            while more and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                more = message["type"] == "http.request" and message.get("more_body", False)


def _deadline(headers: Headers) -> float | None:
    """Seconds that the client gives the call; none if it says nothing. Raises RequestError for what is no such number."""
    text = headers.get(DEADLINE)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DEADLINE_S:
        text = f"{DEADLINE} must be a number of seconds above 0, at most {MAX_DEADLINE_S:g}"
        raise RequestError(text, code="invalid_header", param=DEADLINE)
    return seconds
