"""The application: which path does what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rackserve import __version__
from rackserve.api.desk import Desk
from rackserve.api.dialects.chat import Chat
from rackserve.api.dialects.completions import Completions
from rackserve.api.dialects.dialect import Dialect
from rackserve.api.dialects.messages import Messages
from rackserve.api.dialects.responses import Responses
from rackserve.api.endpoint import Endpoint, GenerationEndpoint, Service
from rackserve.api.factory import RequestFactory
from rackserve.api.gateway import Gateway
from rackserve.api.health import PATHS, Health, knows
from rackserve.api.journal import Witness
from rackserve.api.metrics import Metrics
from rackserve.api.openapi import document
from rackserve.api.refusals import refuse_path
from rackserve.api.state import ServerState
from rackserve.api.token_endpoints import TokenEndpoint, count_tokens, detokenize, tokenize


def create_app(
    gateway: Gateway,
    factory: RequestFactory,
    metrics: Metrics,
    state: ServerState,
    witnesses: Sequence[Witness] = (),
    pages: Sequence[Route] = (),
) -> Starlette:
    """The ASGI application of one served model; `witnesses` see each call begin, `pages` are for people.

    Its worker threads end with its lifespan.
    """
    desk = Desk(factory.limits)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        desk.close()

    async def models(_: Request) -> Response:
        entries = [
            {"id": name, "object": "model", "created": 0, "owned_by": "rackserve", "max_model_len": factory.max_model_len}
            for name in factory.models
        ]
        return _json({"object": "list", "data": entries})

    health = Health(state, lambda: gateway.num_open)

    async def tell_health(request: Request) -> Response:
        answer = health.answer(request.url.path, details=knows(request.scope))
        assert answer is not None, "only the paths of health lead here"
        status, body, headers = answer
        return Response(body, status, headers, media_type="application/json")

    async def scrape(_: Request) -> Response:
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    service = Service(gateway, factory, desk, metrics, state, tuple(witnesses))
    dialects: dict[str, Dialect] = {
        "/v1/completions": Completions(),
        "/v1/chat/completions": Chat(),
        "/v1/responses": Responses(),
        "/v1/messages": Messages(),
    }
    endpoints: dict[str, Endpoint] = {path: GenerationEndpoint(service, dialect) for path, dialect in dialects.items()}
    endpoints["/v1/messages/count_tokens"] = TokenEndpoint(service, count_tokens)
    endpoints["/tokenize"] = TokenEndpoint(service, tokenize)
    endpoints["/detokenize"] = TokenEndpoint(service, detokenize)

    @cache
    def described() -> bytes:
        return document([(route.path, route.methods or ()) for route in routes], factory.models, __version__)

    async def describe(_: Request) -> Response:
        return Response(described(), media_type="application/json")

    routes = [
        Route("/v1/models", models),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
        *(Route(path, tell_health) for path in PATHS),
        Route("/metrics", scrape),
        Route("/openapi.json", describe),
        *pages,
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: refuse_path}, lifespan=lifespan)
    app.router.redirect_slashes = False  # it leads to http:// where a proxy speaks TLS for us
    return app


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
