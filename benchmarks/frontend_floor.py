"""The least a front end in Python can do: uvicorn, and an application that reads the body and sends bytes made beforehand.

`python frontend_floor.py CHUNKS [httptools]` prints its port and serves until it is ended. Imports nothing of rackserve, so it
runs in any environment with uvicorn. CHUNKS is a file: a JSON list of the first event, that of a token, the last ones, and a
plain answer. `Beat` is the engine that costs nothing, the same one behind every front end here.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

STEP_S = 0.002
"""Shortest step of the engine that costs nothing."""

STEP_S_PER_REQUEST = 0.0005
"""A step lasts this long for each request in it: long enough for servers to keep up, so that no two tokens share an event."""

Due = list[tuple[str, int, bool]]
"""Request, number of its next token, whether that is its last."""


class Beat:
    """Steps of an engine without cost: in each, every request gets one token. `emit` gets all of a step at once."""

    def __init__(self, emit: Callable[[Due], None]) -> None:
        self._emit = emit
        self._live: dict[str, list[int]] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, request: str, tokens: int) -> None:
        self._live[request] = [0, tokens]
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._live:
            await asyncio.sleep(max(STEP_S, STEP_S_PER_REQUEST * len(self._live)))
            due: Due = []
            for request, state in list(self._live.items()):
                due.append((request, state[0], state[0] + 1 == state[1]))
                state[0] += 1
                if state[0] == state[1]:
                    del self._live[request]
            self._emit(due)
        self._task = None


class Floor:
    """The application."""

    def __init__(self, first: bytes, token: bytes, last: bytes, plain: bytes) -> None:
        self._first, self._token, self._last, self._plain = first, token, last, plain
        self._waiting: dict[str, asyncio.Queue[bool]] = {}
        self._beat = Beat(self._emit)
        self._number = 0

    def _emit(self, due: Due) -> None:
        for name, _, last in due:
            self._waiting[name].put_nowait(last)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        tokens, streams = int(dict(scope["headers"])[b"x-tokens"]), b"x-plain" not in dict(scope["headers"])
        self._number += 1
        name, queue = str(self._number), asyncio.Queue[bool]()
        self._waiting[name] = queue
        self._beat.add(name, tokens)
        kind = b"text/event-stream" if streams else b"application/json"
        size = [] if streams else [(b"content-length", str(len(self._plain)).encode())]
        if streams:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *size]})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
        last = False
        while not last:
            last = await queue.get()
            if streams:
                await send({"type": "http.response.body", "body": self._token, "more_body": True})
        del self._waiting[name]
        if streams:
            await send({"type": "http.response.body", "body": self._last})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *size]})
            await send({"type": "http.response.body", "body": self._plain})


def main() -> None:
    parts = [part.encode() for part in json.loads(Path(sys.argv[1]).read_text())]
    fast = sys.argv[2:] == ["httptools"]
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(
        Floor(*parts),
        http="httptools" if fast else "h11",
        loop="uvloop" if fast else "asyncio",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
