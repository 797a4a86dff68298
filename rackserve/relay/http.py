"""The router's application: which path does what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rackserve.api.admission import Admission
from rackserve.api.guard import Guard
from rackserve.api.health import knows
from rackserve.api.refusals import refuse_path
from rackserve.relay.forward import Forward
from rackserve.relay.pairs import PAIR_PATHS, ForwardPair
from rackserve.relay.relay import Relay
from rackserve.relay.watch import watching

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
"""What is forwarded, with POST."""


def create_app(relay: Relay) -> ASGIApp:
    """The ASGI application behind its guard; its lifespan watches the workers."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with watching(relay):
            yield
        await relay.aclose()

    app = Starlette(routes=routes(relay), exception_handlers={HTTPException: refuse_path}, lifespan=lifespan)
    app.router.redirect_slashes = False  # it leads to http:// where a proxy speaks TLS for us
    config, door = relay.config, relay.door
    admission = Admission(app, config.tenant_requests)
    return Guard(admission, door.keys, None, hosts=door.hosts, open_metrics=config.security.open_metrics)


def routes(relay: Relay) -> list[Route]:
    """What is forwarded and what the router answers itself."""

    async def models(_: Request) -> Response:
        entries: list[dict[str, object]] = []
        for name, context in relay.fleet.models().items():
            told = {"max_model_len": context} if context else {}
            entries.append({"id": name, "object": "model", "created": 0, "owned_by": "worker", **told})
        return _json({"object": "list", "data": entries})

    async def health(request: Request) -> Response:
        ready = relay.is_ready
        body: dict[str, object] = {"live": True, "ready": ready, "draining": relay.draining}
        if request.url.path == "/ready" or not knows(request.scope):
            return _json(body, 200 if ready else 503)
        workers = [
            {
                "worker": worker.name,
                "role": worker.config.role,
                "up": worker.up,
                "circuit": worker.breaker.state,
                "in_flight": worker.in_flight,
                "holdings": "events" if worker.name in relay.feeds else "learned",
            }
            for worker in relay.fleet.workers
        ]
        return _json({**body, "open_requests": relay.num_open, "workers": workers}, 200 if ready else 503)

    async def live(_: Request) -> Response:
        return _json({"live": True})

    async def scrape(_: Request) -> Response:
        return Response(relay.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    paths = [path for path in PATHS if not relay.config.has_pairs or path in PAIR_PATHS]
    make = ForwardPair if relay.config.has_pairs else Forward
    return [
        *(Route(path, make(relay, path), methods=["POST"]) for path in paths),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/ready", health),
        Route("/live", live),
        Route("/metrics", scrape),
    ]


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
