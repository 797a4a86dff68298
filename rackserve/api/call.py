"""One HTTP request, ready to run, and whom it is for."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rackserve.api.ask import Ask
from rackserve.base.request import Request
from rackserve.text.answers import AnswerParser


class Caller(msgspec.Struct, frozen=True):
    """Who sent a request, as far as the server has made sure.

    tenant  shares no cache with others; empty: the only one
    admin   may use admin routes
    key     name of the key that was used, for logs
    """

    tenant: str = ""
    admin: bool = False
    key: str = ""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` are the choices: all `n` of the first prompt, then of the second ...

    parser         makes the parser of one choice's text
    clamped        choices whose limit of output tokens was cut to the room in the context
    reasoning_end  id of the token that ends the reasoning every answer begins with; -1: none does
    left_at        for each request the position at which its prompt left the last one of its session; None: it went on from it
    """

    id: str
    created: int
    model: str
    ask: Ask
    requests: tuple[Request, ...]
    parser: Callable[[], AnswerParser]
    clamped: int = 0
    reasoning_end: int = -1
    left_at: tuple[int | None, ...] = ()
