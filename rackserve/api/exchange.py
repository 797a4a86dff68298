"""One HTTP exchange over ASGI: a bounded body in, JSON or server-sent events out, and the moment the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from rackserve.api.call import Caller
from rackserve.api.dialects.dialect import Event
from rackserve.api.limits import Limits
from rackserve.base.errors import RequestError

_READ_ON = 4
"""A body up to this many times the limit is read to its end before it is refused."""


class ClientGone(Exception):
    """The client closed the connection, or stopped taking the answer."""


class Exchange:
    """One request and its answer.

    path     where it was sent
    started  the status line is out, so a failure can only be told inside the stream
    caller   whom the guard let in
    notes    further headers of the answer
    """

    __slots__ = ("_limits", "_receive", "_send", "_since", "caller", "headers", "notes", "path", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.path: str = scope["path"]
        self.headers = Headers(scope=scope)
        self.caller: Caller = scope.get("caller") or Caller()
        self.started = False
        self.notes: dict[str, str] = {}
        self._receive = receive
        self._send = send
        self._limits = limits
        self._since = -1.0  # when the part of a stream on its way was sent

    async def body(self) -> bytes:
        """The request body. Raises RequestError (413, 408) or ClientGone.

        Of a body beyond the limit nothing is kept, but it is read on for a while: a client that is still sending would see a
        broken connection instead of the refusal.
        """
        limit = self._limits.body_bytes
        announced = self.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > _READ_ON * limit:
            raise _too_large(limit)
        parts = bytearray()
        size, more = 0, True
        while more:
            message = await self._next_part()
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size <= limit:
                parts += part
            else:
                parts.clear()
                more = more and size <= _READ_ON * limit
        if size > limit:
            raise _too_large(limit)
        return bytes(parts)

    async def _next_part(self) -> Message:
        try:
            async with asyncio.timeout(self._limits.body_s):
                message = await self._receive()
        except TimeoutError as error:
            text = f"no part of the body came for {self._limits.body_s:g} seconds"
            raise RequestError(text, code="request_timeout", status=408) from error
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    async def hang_up(self) -> None:
        """Return when the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """A whole response."""
        await self._start(status, {"content-type": "application/json", **(headers or {}), "content-length": str(len(body))})
        await self._put({"type": "http.response.body", "body": body})

    async def send_events(self, events: Sequence[Event], *, last: bool = False) -> None:
        """Server-sent events in one part; the first part brings the headers, the `last` one closes the response.

        Whoever runs this watches `patience`: without a limit of its own a part costs less, and there is one for each token.
        """
        if not self.started:
            await self._start(
                200,
                {
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                },
            )
        body = b"".join([_written(event) for event in events])
        self._since = asyncio.get_running_loop().time()
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})
        except OSError as error:
            raise ClientGone from error
        finally:
            self._since = -1.0

    def patience(self) -> float:
        """Seconds until a client that is not taking its part of a stream counts as gone: not above 0 when it does."""
        waited = 0.0 if self._since < 0 else asyncio.get_running_loop().time() - self._since
        return self._limits.send_s - waited

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        raw = [(name.encode(), value.encode()) for name, value in {**self.notes, **headers}.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limits.send_s):
                await self._send(message)
        except (OSError, TimeoutError) as error:
            raise ClientGone from error


def _written(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.name.encode(), event.data) if event.name else b"data: %b\n\n" % event.data


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body is larger than {limit} bytes (limits.body_bytes)", code="body_too_large", status=413)
