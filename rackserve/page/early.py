"""The page before there is a model: it loads, takes a key and shows the ranks as they come up, and its chat waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send


class Early:
    """Wraps the application. `is_loading`: its own routes do not answer yet, so `pages` do."""

    __slots__ = ("_app", "_is_loading", "_pages", "_paths")

    def __init__(self, app: ASGIApp, pages: Sequence[Route], is_loading: Callable[[], bool]) -> None:
        self._app = app
        self._pages = Starlette(routes=list(pages))
        self._paths = frozenset(route.path for route in pages)
        self._is_loading = is_loading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        early = scope["type"] == "http" and scope["path"] in self._paths and self._is_loading()
        await (self._pages if early else self._app)(scope, receive, send)
