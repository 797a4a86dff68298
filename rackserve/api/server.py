"""Listens on a port and ends in good order."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from rackserve.api.errors import error_body
from rackserve.base.errors import RequestError, ResourceError


class _TimedProtocol(H11Protocol):
    """Closes a connection on which the head of a request has begun and does not end."""

    head_s = 30.0
    _timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is None and self._waits_for_head():
            self._timer = self.loop.call_later(self.head_s, self._on_timer)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP as everything is refused, and end the connection. Called where h11 has said what is wrong."""
        problem = sys.exception()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            too_large = isinstance(problem, h11.RemoteProtocolError) and problem.error_status_hint == 431
            status, code = (431, "headers_too_large") if too_large else (400, "invalid_http")
            body = error_body(RequestError(f"not taken for HTTP: {problem or msg}", code=code, status=status))
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _waits_for_head(self) -> bool:
        cycle = self.cycle
        return cycle is None or cycle.response_complete

    def _on_timer(self) -> None:
        self._timer = None
        if self._waits_for_head() and not self.transport.is_closing():
            self.transport.close()


class OpenAnswers(Protocol):
    """The answers being given."""

    async def wait_idle(self) -> None:
        """Return when no answer is open."""
        ...

    def close(self, detail: str) -> None:
        """End every open answer with an error that says `detail`, and refuse later ones."""
        ...


class Drainable(Protocol):
    """Says that no new work is taken once `draining` is set."""

    draining: bool


class _Server(uvicorn.Server):
    """Leaves signals to the command line, which sets `stop`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


RESERVED_DESCRIPTORS = 200
"""Kept back from clients: ranks, their memory and restarts need descriptors too."""


def _connection_limit() -> int:
    """How many clients may be connected at once: what the system allows this process, less the reserve; beyond it: 503."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(16, max(soft, allowed) - RESERVED_DESCRIPTORS)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` (a name or an address); port 0 lets the system choose.

    Raises ResourceError naming the port and the remedy when it is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ResourceError(f"host {host!r} cannot be resolved ({error}); use an address such as 127.0.0.1") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = "is in use; choose another with --port" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error})"
        raise ResourceError(f"port {port} on {host} {reason}") from error
    return listener


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    gateway: OpenAnswers,
    state: Drainable,
    stop: asyncio.Event,
    grace_s: float = 30.0,
    drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until `stop` is set, then drain: refuse new work (503), let open answers end, return.

    `grace_s` bounds the drain in seconds; answers still open then end with an error event. `drain` is called when the drain
    begins (it may, for example, drain the frontend node) and shares the bound.
    """
    config = uvicorn.Config(
        app,
        http=_TimedProtocol,
        limit_concurrency=_connection_limit(),
        access_log=False,
        log_config=None,
        log_level="warning",
        h11_max_incomplete_event_size=64 << 10,
        lifespan="on",
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        state.draining = True
        try:
            async with asyncio.timeout(grace_s):
                if drain is not None:
                    await drain()
                await gateway.wait_idle()
        except TimeoutError:
            pass
        gateway.close(f"the server is shutting down and the answer did not end within {grace_s:g} seconds")
    finally:
        stopping.cancel()
        server.should_exit = True
        await running
        listener.close()
