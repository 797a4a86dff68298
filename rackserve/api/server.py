"""Listens on a port and ends in good order."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from rackserve.api.gateway import Gateway
from rackserve.api.state import ServerState
from rackserve.base.errors import ResourceError


class _Server(uvicorn.Server):
    """Leaves signals to the command line, which sets `stop`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    app: Starlette,
    listener: socket.socket,
    *,
    gateway: Gateway,
    state: ServerState,
    stop: asyncio.Event,
    grace_s: float = 30.0,
    drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until `stop` is set, then drain: refuse new work (503), let open answers end, return.

    `grace_s` bounds the drain in seconds; answers still open then end with an error event. `drain` is called when the drain
    begins (it may, for example, drain the frontend node) and shares the bound.
    """
    config = uvicorn.Config(
        app, access_log=False, log_level="warning", lifespan="on", timeout_graceful_shutdown=5, server_header=False
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
