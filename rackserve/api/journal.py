"""One line for the end of each request, and one for each refusal. Never a prompt, an answer or a key."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rackserve.api.call import Call, Caller
from rackserve.api.health import PATHS
from rackserve.api.logs import FIELDS
from rackserve.base.events import RequestEnded
from rackserve.base.units import Time
from rackserve.live.recorder import Recorded

log = logging.getLogger("rackserve.requests")

MAX_OPEN = 100_000


class Witness(Protocol):
    """Sees calls begin; that their requests end, it learns from recorded events."""

    def begin(self, call: Call, caller: Caller, headers: Mapping[str, str]) -> None:
        """`call` is about to be submitted for `caller`."""
        ...


class Journal:
    """A witness and a sink (see recorder). n choices are n lines of one `call`.

    Times are seconds; ttft_s is missing where there was no token. `key` is the name of the caller's key. `left_at` is the
    position from which on the prompt differs from its session's last one; missing if it goes on from that.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: OrderedDict[str, dict[str, object]] = OrderedDict()

    def begin(self, call: Call, caller: Caller, headers: Mapping[str, str]) -> None:
        """Remember what only the front end knows of the requests in `call`."""
        known: dict[str, object] = {"call": call.id, "model": call.model, "kind": call.ask.kind, "stream": call.ask.stream}
        if caller.key:
            known |= {"key": caller.key, "tenant": caller.tenant}
        for place, request in enumerate(call.requests):
            left_at = call.left_at[place] if call.left_at else None
            self._open[request.id] = known if left_at is None else {**known, "left_at": left_at}
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def __call__(self, recorded: Recorded) -> None:
        event = recorded.event
        if isinstance(event, RequestEnded):
            known = self._open.pop(event.request, {})
            fields = {
                "id": event.request,
                **known,
                "outcome": event.outcome,
                "reason": event.reason,
                "prompt_tokens": event.prompt_tokens,
                "cached_tokens": event.cached_tokens,
                "output_tokens": event.output_tokens,
                "attempts": event.attempts,
                **({"ttft_s": _seconds(event.ttft_ns)} if event.ttft_ns >= 0 else {}),
                "duration_s": _seconds(event.total_ns),
            }
            log.info("request", extra={FIELDS: fields})


class RefusalLog:
    """Wraps an application: a line for each exchange that it answers with a status of 400 or more, whoever refused it.

    Not for probes of health: they say how the server is, again and again. `count` is told the status of each.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and scope["path"] not in PATHS:
                caller = scope.get("caller") or Caller()
                fields = {
                    "method": scope["method"],
                    "path": scope["path"][:200],
                    "status": message["status"],
                    **({"key": caller.key} if caller.key else {}),
                    "duration_s": round(time.monotonic() - begun, 6),
                }
                log.info("refused", extra={FIELDS: fields})
                self._count(str(message["status"]))
            await send(message)

        await self._app(scope, receive, watch)


def _seconds(time_ns: Time) -> float:
    return round(time_ns / 1e9, 6)
