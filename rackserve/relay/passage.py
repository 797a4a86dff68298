"""The client's side of a request that passes: its body in, the worker's answer out, byte for byte."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from rackserve.api.errors import error_headers
from rackserve.api.exchange import Exchange
from rackserve.api.limits import Limits
from rackserve.api.refusals import body_for, last_event
from rackserve.base.errors import RequestError
from rackserve.relay.door import Door
from rackserve.relay.upstream import HOP_BY_HOP, RawHeaders

_NOT_PASSED = HOP_BY_HOP | {b"host", b"content-length"}
RANK_HEADER = "x-data-parallel-rank"


class Passage(Exchange):
    """An exchange whose answer is somebody else's. `status`: of the answer, 0 before it began."""

    __slots__ = ("_is_stream", "status")

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        super().__init__(scope, receive, send, limits)
        self._is_stream = False
        self.status = 0

    @property
    def dp_rank(self) -> int | None:
        """The rank the client asks for. Raises RequestError if it is no number."""
        asked = self.headers.get(RANK_HEADER)
        if asked is None:
            return None
        if not asked.isascii() or not asked.isdecimal() or len(asked) > 6:
            raise RequestError(f"{RANK_HEADER} must be a number, got {asked[:40]!r}", param=RANK_HEADER)
        return int(asked)

    def passed_headers(self, dp_rank: int | None, door: Door) -> list[tuple[bytes, bytes]]:
        """What goes on to the worker: all but what belongs to this connection and, where `door` asks for keys, to the router;
        with the rank it is for and the worker's key."""
        dropped = {*_NOT_PASSED, RANK_HEADER.encode(), *door.kept_back}
        named = self.headers.get("connection", "").lower().encode("latin-1").split(b",")
        dropped.update(name.strip() for name in named)
        headers = [(name, value) for name, value in self.headers.raw if name not in dropped]
        headers += door.for_workers
        if dp_rank is not None:
            headers.append((RANK_HEADER.encode(), str(dp_rank).encode()))
        return headers

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Send the head of the worker's answer."""
        self.started, self.status = True, status
        self._is_stream = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
        await self._put({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send_whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """An answer that was read to its end before."""
        await self.begin(status, headers)
        await self.pass_on(body)
        await self.end()

    async def pass_on(self, piece: bytes) -> None:
        """The next piece of its body."""
        await self._put({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """The end of its body."""
        await self._put({"type": "http.response.body", "body": b""})

    async def refuse(self, error: RequestError) -> None:
        """Tell an error of the router's own. Before the first byte only."""
        await self.reply(body_for(self.path, error), status=error.status, headers=error_headers(error))

    async def break_off(self, error: RequestError) -> None:
        """The worker broke off in the middle. A stream ends with an event that tells so; anything else must not look complete,
        so its connection is closed, which the server does to an answer that has no end.
        """
        if not self._is_stream:
            return
        await self.pass_on(last_event(self.path, error))
        await self.end()
