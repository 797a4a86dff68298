"""HTTP/1.1 for a client that must not be its own bottleneck: a transport for httpx that costs a few microseconds a chunk.

Every segment is stamped when it arrives, before anything else runs, so that fifty tokens of one step keep one time whatever
it takes to read them. Connections are kept and used again, one request at a time each.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import httpx

from rackserve.base.units import Time

MAX_HEAD_BYTES = 65_536


class _Connection(asyncio.Protocol):
    """One connection. `arrived_ns`: when the segment last read from came in."""

    def __init__(self, now: Callable[[], Time]) -> None:
        self._now = now
        self._segments: deque[tuple[bytes, Time]] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._buffer = bytearray()
        self._failure: Exception | None = None
        self._transport: asyncio.Transport | None = None
        self.closed = False
        self.arrived_ns: Time = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._segments.append((data, self._now()))
        self._wake()

    def eof_received(self) -> None:
        self.closed = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed, self._failure = True, exc
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_idle(self) -> bool:
        """It may carry another request: still open, and nothing came unasked."""
        return not (self.closed or self._segments or self._buffer)

    @property
    def has_chunk(self) -> bool:
        """Whether a whole chunk, or the end of the chunks, is in the buffer."""
        end = self._buffer.find(b"\r\n")
        try:
            return end >= 0 and len(self._buffer) >= end + 4 + int(self._buffer[:end].split(b";")[0], 16)
        except ValueError:
            return False  # reading it will tell

    async def more(self) -> bool:
        """Take the next segment into the buffer; False if the server has closed the connection."""
        while not self._segments:
            if self._failure is not None:
                raise httpx.ReadError(str(self._failure) or type(self._failure).__name__)
            if self.closed:
                return False
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        data, self.arrived_ns = self._segments.popleft()
        self._buffer += data
        return True

    async def until(self, mark: bytes) -> bytes:
        """The bytes up to and with `mark`."""
        while (end := self._buffer.find(mark)) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise httpx.RemoteProtocolError(f"the server sent {len(self._buffer)} bytes without an end of line")
            if not await self.more():
                raise httpx.RemoteProtocolError("the server closed the connection in the middle of an answer")
        return self.take(end + len(mark))

    async def exactly(self, count: int) -> bytes:
        """The next `count` bytes."""
        while len(self._buffer) < count:
            if not await self.more():
                raise httpx.RemoteProtocolError("the server closed the connection in the middle of an answer")
        return self.take(count)

    async def some(self, most: int) -> bytes:
        """What is there, at least one byte and at most `most`."""
        while not self._buffer:
            if not await self.more():
                raise httpx.RemoteProtocolError("the server closed the connection in the middle of an answer")
        return self.take(most)

    def take(self, count: int | None = None) -> bytes:
        """The first `count` bytes of the buffer, or all of it."""
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data


class _Body(httpx.AsyncByteStream):
    """The body of an answer, as its pieces come in."""

    def __init__(self, connection: _Connection, headers: httpx.Headers, give_back: Callable[[], None]) -> None:
        self._connection = connection
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._length = headers.get("content-length")
        self._keeps = "close" not in headers.get("connection", "").lower()
        self._give_back = give_back
        self._complete = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self._connection
        try:
            if self._chunked:
                parts = []
                while size := int((await connection.until(b"\r\n")).split(b";")[0], 16):
                    parts.append((await connection.exactly(size + 2))[:-2])
                    if not connection.has_chunk:  # what came together is given together: whoever passes it on pays per piece
                        yield b"".join(parts)
                        parts.clear()
                if parts:
                    yield b"".join(parts)
                while await connection.until(b"\r\n") != b"\r\n":
                    pass  # trailers
            elif self._length is not None:
                left = int(self._length)
                while left:
                    yield (piece := await connection.some(left))
                    left -= len(piece)
            else:
                self._keeps = False
                if early := connection.take():  # what came together with the head
                    yield early
                while await connection.more():
                    yield connection.take()
        except ValueError as error:
            raise httpx.RemoteProtocolError(f"the server's framing is wrong: {error}") from None
        self._complete = True

    async def aclose(self) -> None:
        """Keep the connection if the answer was read to its end, else close it."""
        if self._complete and self._keeps and self._connection.is_idle:
            self._give_back()
        else:
            self._connection.close()


class LeanTransport(httpx.AsyncBaseTransport):
    """Sends requests of an `httpx.AsyncClient`.

    `now` stamps what arrives. A response's extension "arrived_ns" is a function: when the piece of the body last given came in.
    """

    def __init__(self, now: Callable[[], Time] = time.monotonic_ns) -> None:
        self._now = now
        self._idle: dict[tuple[str, str, int], list[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; the response when its head has arrived."""
        origin = (request.url.scheme, request.url.host, request.url.port or (443 if request.url.scheme == "https" else 80))
        connection = await self._connect(origin)
        try:
            head = [f"{request.method} {request.url.raw_path.decode('ascii')} HTTP/1.1".encode()]
            head += [name + b": " + value for name, value in request.headers.raw]
            connection.write(b"\r\n".join(head) + b"\r\n\r\n" + await request.aread())
            status, headers = 100, httpx.Headers()
            while status < 200:  # interim answers say nothing
                status, headers = _parse_head(await connection.until(b"\r\n\r\n"))
        except BaseException:
            connection.close()
            raise
        body = _Body(connection, headers, lambda: self._idle.setdefault(origin, []).append(connection))
        stamps = {"arrived_ns": lambda: connection.arrived_ns}
        return httpx.Response(status, headers=headers, stream=body, request=request, extensions=stamps)

    async def _connect(self, origin: tuple[str, str, int]) -> _Connection:
        idle = self._idle.get(origin, [])
        while idle:
            if (kept := idle.pop()).is_idle:
                return kept
            kept.close()
        scheme, host, port = origin
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(
                lambda: _Connection(self._now), host, port, ssl=self._tls if scheme == "https" else None
            )
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return made

    async def aclose(self) -> None:
        """Close the connections that are kept."""
        for kept in self._idle.values():
            for connection in kept:
                connection.close()
        self._idle.clear()


def _parse_head(raw: bytes) -> tuple[int, httpx.Headers]:
    first, *lines = raw[:-4].split(b"\r\n")
    try:
        version, status, *_ = first.split(b" ", 2)
        if not version.startswith(b"HTTP/1."):
            raise ValueError(f"begins with {first[:40]!r}")
        pairs = [line.split(b":", 1) for line in lines]
        return int(status), httpx.Headers([(name.strip(), value.strip()) for name, value in pairs])
    except ValueError as error:
        raise httpx.RemoteProtocolError(f"the server's answer is not HTTP/1.1: {error}") from None
