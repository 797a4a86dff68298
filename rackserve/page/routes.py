"""Which path of the page does what. Files are read once; nothing a request says becomes part of a file's name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rackserve.page.door import Door
from rackserve.page.feed import Feed

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def page_routes(feed: Feed, door: Door) -> list[Route]:
    """`/`, its files below `/page/`, `/page/feed`, and the way in and out."""
    files = [path for path in sorted(STATIC.rglob("*")) if path.suffix in KINDS and path.name != "index.html"]
    return [
        Route("/", _file(STATIC / "index.html")),
        Route("/page/feed", feed, methods=["GET"]),
        *(Route(f"/page/{path.relative_to(STATIC).as_posix()}", _file(path)) for path in files),
        Route("/login", door.login, methods=["POST"]),
        Route("/logout", door.logout, methods=["POST"]),
    ]


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    body, kind = path.read_bytes(), KINDS[path.suffix]

    async def answer(_: Request) -> Response:
        return Response(body, headers=HEADERS, media_type=kind)

    return answer
