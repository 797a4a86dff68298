"""Before there is a model the page answers, and nothing else does."""

from __future__ import annotations

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rackserve.page.early import Early
from tests.api.rig import run


def told(said: str) -> Route:
    async def answer(_: Request) -> Response:
        return PlainTextResponse(said)

    return Route("/" if said == "page" else "/v1/models", answer)


def test_pages_answer_while_it_is_loading_and_the_application_afterwards() -> None:
    async def scene() -> list[str]:
        loading, seen = True, []
        app = Starlette(routes=[Route("/", told("application").endpoint), told("application")])
        early = Early(app, [told("page")], lambda: loading)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(early), base_url="http://rig") as client:
            for loading in (True, False):  # noqa: B007
                seen += [(await client.get(path)).text for path in ("/", "/v1/models", "/elsewhere")]
        return seen

    assert run(scene()) == ["page", "application", "Not Found", "application", "application", "Not Found"]
