"""What one route promises: what it reads, what it answers, and how it tells of errors."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from rackserve.api.dialects import shapes
from rackserve.api.dialects.body import Table
from rackserve.api.dialects.chat import CHAT
from rackserve.api.dialects.completions import COMPLETION
from rackserve.api.dialects.messages import COUNT, MESSAGE
from rackserve.api.dialects.responses import RESPONSE
from rackserve.api.token_endpoints import DETOKENIZE, TOKENIZE

JSON = "application/json"
EVENTS = "text/event-stream"


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """One route, as `/openapi.json` describes it.

    summary   one line for people
    bodies    tables of the bodies it reads: any of them, each together with `extra`; none: it reads no body
    extra     a table of fields that may stand beside those of `bodies`
    answer    shape of its plain answer; None: not JSON, but `media`
    media     media types of what it answers
    statuses  what it can answer besides 200, of `errors.STATUSES` or below them
    error     shape of its errors
    open      it needs no key
    session   it reads the headers that name a conversation
    """

    summary: str
    bodies: tuple[Table[Any], ...] = ()
    extra: Table[Any] | None = None
    answer: type[msgspec.Struct] | None = None
    media: tuple[str, ...] = (JSON,)
    statuses: tuple[int, ...] = ()
    error: type[msgspec.Struct] = shapes.ErrorAnswer
    open: bool = False
    session: bool = False


_LETS_IN = (401, 403, 421, 431)
_ASKED = (*_LETS_IN, 503)
_READS = (400, *_LETS_IN, 404, 408, 413, 429, 500, 503, 504)


def _generates(summary: str, table: Table[Any], answer: type[msgspec.Struct], **changes: Any) -> Contract:
    media = (JSON, EVENTS)
    return Contract(
        summary=summary, bodies=(table,), answer=answer, media=media, statuses=_READS, session=True, **changes
    )  # fmt: skip


CONTRACTS: dict[str, Contract] = {
    "/v1/chat/completions": _generates("Answer a conversation.", CHAT, shapes.ChatAnswer),
    "/v1/completions": _generates("Go on from a text, or score it.", COMPLETION, shapes.TextAnswer),
    "/v1/responses": _generates("Answer items; nothing is stored.", RESPONSE, shapes.ResponseAnswer),
    "/v1/messages": _generates("Answer messages.", MESSAGE, shapes.MessageAnswer, error=shapes.MessagesError),
    "/v1/messages/count_tokens": Contract(
        summary="Count the tokens of messages.",
        bodies=(COUNT,),
        answer=shapes.CountAnswer,
        statuses=_READS,
        error=shapes.MessagesError,
        session=True,
    ),
    "/tokenize": Contract(
        summary="The ids of a prompt.",
        bodies=(COMPLETION, CHAT),
        extra=TOKENIZE,
        answer=shapes.TokenizeAnswer,
        statuses=_READS,
        session=True,
    ),
    "/detokenize": Contract(summary="The text of ids.", bodies=(DETOKENIZE,), answer=shapes.DetokenizeAnswer, statuses=_READS),
    "/v1/models": Contract(summary="What is served.", answer=shapes.ModelList, statuses=_ASKED),
    "/openapi.json": Contract(summary="This description.", statuses=_ASKED),
    "/metrics": Contract(summary="What Prometheus scrapes.", media=(CONTENT_TYPE_LATEST,), statuses=_ASKED),
    "/live": Contract(
        summary="Whether the process turns.", answer=shapes.HealthAnswer, statuses=(403, 421, 431, 503), open=True
    ),
    "/ready": Contract(
        summary="Whether work is taken and moves.", answer=shapes.HealthAnswer, statuses=(403, 421, 431, 503), open=True
    ),
    "/health": Contract(
        summary="As /ready, with details for holders of a key.",
        answer=shapes.HealthAnswer,
        statuses=(403, 421, 431, 503),
        open=True,
    ),
}
"""Every route of the API but the pages for people."""
