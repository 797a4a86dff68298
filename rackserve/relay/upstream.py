"""The way to a worker and back: one HTTP exchange whose body comes as the bytes the worker sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import httpx

from rackserve.bench.wire import LeanTransport
from rackserve.relay.workers import Worker

RawHeaders = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {b"connection", b"date", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
     b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
"""Headers that belong to one connection, or are written by each server itself."""

MAX_WHOLE_BYTES = 64 << 20


class WorkerFailed(Exception):
    """The worker did not answer, or broke off. `refused`: nobody listens there."""

    def __init__(self, detail: str, *, refused: bool = False) -> None:
        super().__init__(detail)
        self.refused = refused


class WorkerAnswer:
    """An answer whose head and first piece have come."""

    __slots__ = ("_first", "_gap_s", "_stream", "headers", "status")

    def __init__(self, response: httpx.Response, first: bytes, stream: AsyncIterator[bytes], gap_s: float) -> None:
        self.status = response.status_code
        self.headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in HOP_BY_HOP]
        self._first = first
        self._stream = stream
        self._gap_s = gap_s

    async def all_pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes; to be closed if it is not read to its end.

        Raises WorkerFailed if the worker breaks off or is silent for too long.
        """
        loop = asyncio.get_running_loop()
        if self._first:
            yield self._first
        try:
            async with asyncio.timeout(self._gap_s) as limit:
                set_at = loop.time()
                async for piece in self._stream:
                    yield piece
                    if loop.time() - set_at > self._gap_s / 8:
                        set_at = loop.time()
                        limit.reschedule(set_at + self._gap_s)
        except TimeoutError as error:
            raise WorkerFailed(f"nothing came for {self._gap_s:g} seconds") from error
        except httpx.HTTPError as error:
            raise WorkerFailed(str(error) or type(error).__name__) from error

    async def whole(self) -> bytes:
        """All of the body. Raises WorkerFailed as `all_pieces`, also for one of more than MAX_WHOLE_BYTES."""
        parts, size = [], 0
        async with aclosing(self.all_pieces()) as pieces:
            async for piece in pieces:
                parts.append(piece)
                size += len(piece)
                if size > MAX_WHOLE_BYTES:
                    raise WorkerFailed(f"the answer is longer than {MAX_WHOLE_BYTES} bytes")
        return b"".join(parts)


class Upstream:
    """Sends requests to workers over connections that are kept."""

    __slots__ = ("_transport", "_urls")

    def __init__(self) -> None:
        self._transport = LeanTransport()
        self._urls: dict[tuple[str, str], httpx.URL] = {}

    @asynccontextmanager
    async def send(
        self, worker: Worker, method: str, path: str, headers: RawHeaders, body: bytes, *, head_s: float, gap_s: float
    ) -> AsyncIterator[WorkerAnswer]:
        """The worker's answer, once the first piece of its body is there: servers send a head before they have done anything.

        Raises WorkerFailed if that takes more than `head_s` seconds or the worker goes down meanwhile. Left early, however, the
        connection is closed, which is how a worker learns that nobody wants the answer any more.
        """
        url = self._urls.get((worker.name, path))
        if url is None:
            url = self._urls[worker.name, path] = httpx.URL(worker.config.url + path)
        request = httpx.Request(method, url, headers=list(headers), content=body)
        response: httpx.Response | None = None
        try:
            try:
                async with asyncio.timeout(head_s) as limit:
                    worker.wait(limit)
                    try:
                        response = await self._transport.handle_async_request(request)
                        assert isinstance(response.stream, httpx.AsyncByteStream)
                        stream = aiter(response.stream)
                        first = await anext(stream, b"")
                    finally:
                        worker.unwait(limit)
            except TimeoutError as error:
                reason = f"no first byte within {head_s:g} seconds" if worker.up else "the worker went down"
                raise WorkerFailed(reason) from error
            except (httpx.HTTPError, OSError) as error:
                refused = isinstance(error, httpx.ConnectError)
                raise WorkerFailed(str(error) or type(error).__name__, refused=refused) from error
            yield WorkerAnswer(response, first, stream, gap_s)
        finally:
            if response is not None:
                assert isinstance(response.stream, httpx.AsyncByteStream)
                await response.stream.aclose()

    async def aclose(self) -> None:
        """Close the connections that are kept."""
        await self._transport.aclose()
