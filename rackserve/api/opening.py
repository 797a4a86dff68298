"""What answers while the rack starts: alive, not ready yet. Then the application does."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from rackserve.api.errors import error_headers, failure
from rackserve.api.gateway import Gateway
from rackserve.api.health import Health, knows
from rackserve.api.refusals import body_for, head_of


class Opening:
    """An ASGI application that can be served before there is a rack; `open` sets what it passes requests on to."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._app: ASGIApp | None = None
        self._gateway: Gateway | None = None

    def open(self, app: ASGIApp, gateway: Gateway) -> None:
        """From now on `app` answers; its lifespan is the caller's to care for."""
        self._app, self._gateway = app, gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        else:
            answer = self._health.answer(scope["path"], details=knows(scope))
            if answer is None:
                error = failure("unavailable", "the model is being loaded")
                answer = error.status, body_for(scope["path"], error), error_headers(error)
            status, body, headers = answer
            await send(head_of(status, headers, body))
            await send({"type": "http.response.body", "body": body})

    async def wait_idle(self) -> None:
        """Return when no answer is open."""
        if self._gateway is not None:
            await self._gateway.wait_idle()

    def close(self, detail: str) -> None:
        """End every open answer with an error that says `detail`, and refuse later ones."""
        if self._gateway is not None:
            self._gateway.close(detail)


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
