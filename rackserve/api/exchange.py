"""One HTTP exchange over ASGI: a bounded body in, JSON or server-sent events out, and the moment the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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

    started  the status line is out, so a failure can only be told inside the stream
    caller   whom the guard let in
    notes    further headers of the answer
    """

    __slots__ = ("_limits", "_receive", "_send", "caller", "headers", "notes", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.headers = Headers(scope=scope)
        self.caller: Caller = scope.get("caller") or Caller()
        self.started = False
        self.notes: dict[str, str] = {}
        self._receive = receive
        self._send = send
        self._limits = limits

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

    async def send_event(self, event: Event) -> None:
        """One server-sent event; the first one sends the headers."""
        if not self.started:
            await self._start(
                200,
                {
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                },
            )
        name = f"event: {event.name}\n".encode() if event.name else b""
        await self._put({"type": "http.response.body", "body": name + b"data: " + event.data + b"\n\n", "more_body": True})

    async def end_stream(self) -> None:
        """Close the response."""
        await self._put({"type": "http.response.body", "body": b""})

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


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body is larger than {limit} bytes (limits.body_bytes)", code="body_too_large", status=413)
