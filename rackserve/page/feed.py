"""Server-sent events for the page: where it stood so far, then a frame twice a second. Slow readers miss frames, no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rackserve.bench.frontier import Curve, frontier
from rackserve.page.view import RackView, Sample

FRAME_S = 0.5
MAX_READERS = 64
STALLED_S = 30.0
"""A reader that takes nothing for this long is let go; the page asks again."""

_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
_BEGIN: Message = {"type": "http.response.start", "status": 200, "headers": _HEADERS}


class Beginning(msgspec.Struct, frozen=True):
    """The first event. signed_in: there is a session that can end. frontier: (tokens/s/user, tokens/s per GPU) of `curve`."""

    signed_in: bool
    samples: tuple[Sample, ...]
    curve: str
    frontier: tuple[tuple[float, float], ...]


class Feed:
    """GET /page/feed. Frames are made when someone reads, once for all readers, and none is kept for anybody.

    curve   drawn behind the operating point
    ending  whether the server ends, and its readers with it
    """

    def __init__(self, view: RackView, curve: Curve | None = None, ending: Callable[[], bool] = lambda: False) -> None:
        self._view = view
        self._name = "" if curve is None else curve.name
        points = () if curve is None else frontier(curve.points)
        self._frontier = tuple((point.interactivity, point.per_gpu) for point in points)
        self._ending = ending
        self._made_s = float("-inf")
        self._frame = b""
        self.num_readers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A stream of events `begin` and `frame`; 503 beyond MAX_READERS."""
        if self.num_readers >= MAX_READERS:
            await Response("too many pages are open", 503, {"retry-after": "5"})(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # whoever asks for no body waits for its end all the same
            await send(_BEGIN)
            await send(_part(b"", more=False))
            return
        caller = scope.get("caller")
        gone = asyncio.create_task(_wait_gone(receive))
        self.num_readers += 1
        try:
            await self._tell(send, gone, signed_in=bool(caller and caller.key))
        except OSError:  # the reader is gone, or a timeout: it stalled
            pass
        finally:
            self.num_readers -= 1
            gone.cancel()

    async def _tell(self, send: Send, gone: asyncio.Task[None], *, signed_in: bool) -> None:
        await send(_BEGIN)
        frame = self._latest()  # first, as it closes periods
        begin = Beginning(signed_in, tuple(self._view.samples), self._name, self._frontier)
        await send(_part(_event("begin", begin)))
        while not (gone.done() or self._ending()):
            async with asyncio.timeout(STALLED_S):
                await send(_part(frame))
            await asyncio.wait((gone,), timeout=FRAME_S)
            frame = self._latest()
        await send(_part(b"", more=False))

    def _latest(self) -> bytes:
        now = time.monotonic()
        if now - self._made_s >= FRAME_S / 2:
            self._frame = _event("frame", self._view.frame(time.monotonic_ns()))
            self._made_s = now
        return self._frame


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _event(name: str, value: msgspec.Struct) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
