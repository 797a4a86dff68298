"""The exchange of a key for the cookie of a session, and the end of that."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response

from rackserve.api.guard import COOKIE, Sessions
from rackserve.api.keys import KeyRing
from rackserve.page.form import FORM_HEADERS, form

MAX_FORM_BYTES = 4096
FORM_S = 30.0

_LAST = {**FORM_HEADERS, "connection": "close"}


class Door:
    """POST /login with a form's `key`, and POST /logout."""

    __slots__ = ("_keys", "_sessions")

    def __init__(self, keys: KeyRing, sessions: Sessions) -> None:
        self._keys = keys
        self._sessions = sessions

    async def login(self, request: Request) -> Response:
        """Set the cookie and go to the page, or ask again (401).

        413 for a form of more than MAX_FORM_BYTES, 408 for one that did not come within FORM_S seconds.
        """
        raw = b""
        try:
            async with asyncio.timeout(FORM_S):
                async for part in request.stream():
                    raw += part
                    if len(raw) > MAX_FORM_BYTES:
                        return Response(form("that is too long for a key"), 413, _LAST)
        except (TimeoutError, ClientDisconnect):
            return Response(form("the key did not come"), 408, _LAST)
        caller = self._keys.find(_key_in(raw))
        if caller is None:
            return Response(form("the API key is not known here"), 401, FORM_HEADERS)
        response = RedirectResponse("/", 303, {"cache-control": "no-store"})
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, self._sessions.begin(caller), path="/", httponly=True, samesite="strict", secure=secure)
        return response

    async def logout(self, request: Request) -> Response:
        """End the session and go to where the form is."""
        self._sessions.end(request.headers)
        response = RedirectResponse("/", 303, {"cache-control": "no-store"})
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
        return response


def _key_in(raw: bytes) -> str:
    try:
        fields = parse_qs(raw.decode(), max_num_fields=8)
    except ValueError:  # not UTF-8, or more fields than a form of ours has
        return ""
    return fields.get("key", [""])[0].strip()
