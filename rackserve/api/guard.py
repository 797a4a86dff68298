"""The door: every request passes here first. What is not in the short list of open paths needs a key."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rackserve.api.call import Caller
from rackserve.api.errors import error_headers
from rackserve.api.keys import KEY_VARIABLE, KeyRing, key_in
from rackserve.api.refusals import body_for, head_of
from rackserve.base.errors import ConfigError, RequestError
from rackserve.page.form import FORM_HEADERS, asks_for_page, form

LOGIN = ("POST", "/login")
OPEN = frozenset({("GET", "/health"), ("GET", "/live"), ("GET", "/ready"), LOGIN})
"""All that needs no key: whether the server lives, and the form that asks for one. Anything new needs a key."""

ADMIN = "/admin/"
COOKIE = "rackserve_session"
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 1000
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Sessions:
    """Browsers that gave a key: it is kept here under a random name, so that no page ever holds it. Bounded, and ends."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[float, Caller]] = OrderedDict()

    def begin(self, caller: Caller) -> str:
        """The value of the cookie of a new session."""
        while len(self._known) >= MAX_SESSIONS:
            self._known.popitem(last=False)
        name = secrets.token_urlsafe(32)
        self._known[name] = (time.monotonic() + SESSION_S, caller)
        return name

    def find(self, headers: Mapping[str, str]) -> Caller | None:
        """The caller of the session that the request's cookie names."""
        end, caller = self._known.get(_session_in(headers), (0.0, None))
        return caller if time.monotonic() < end else None

    def end(self, headers: Mapping[str, str]) -> None:
        """Forget the session that the request's cookie names, if it is one."""
        self._known.pop(_session_in(headers), None)

    def end_of(self, keys: Set[str]) -> None:
        """Forget the sessions that were begun with one of these keys, by name."""
        for name in [name for name, (_, caller) in self._known.items() if caller.key in keys]:
            del self._known[name]


class Guard:
    """Wraps the application. Puts the `Caller` into the scope of what it lets through.

    sessions      of browsers; None: there is no page to sign in to, so people get errors like programs
    hosts         names under which the server may be addressed; empty: any. Others are refused, as a page of another site
                  whose name was made to point here would be
    open_metrics  /metrics needs no key
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        sessions: Sessions | None,
        *,
        hosts: frozenset[str] = frozenset(),
        open_metrics: bool = False,
    ) -> None:
        self._app = app
        self._keys = keys
        self._sessions = Sessions() if sessions is None else sessions
        self._has_page = sessions is not None
        self._hosts = hosts
        self._open = OPEN - (set() if self._has_page else {LOGIN}) | ({("GET", "/metrics")} if open_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope["caller"] = self._admit(scope)
            except RequestError as error:
                await self._refuse(scope, error, send)
                return
        elif scope["type"] != "lifespan":
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        """Whoever asks. Raises RequestError: 400, 401, 403, 421, 431."""
        raw = scope["headers"]
        if len(raw) > MAX_HEADERS or sum(len(name) + len(value) for name, value in raw) > MAX_HEADER_BYTES:
            text = f"more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them"
            raise RequestError(text, code="headers_too_large", status=431)
        headers = Headers(scope=scope)
        key = key_in(headers) if self._keys else ""
        caller = self._keys.find(key) if key else self._sessions.find(headers) if self._keys else None
        if caller is not None:
            scope["caller"] = caller  # whose it was is told of what is refused, too
        self._check_origin(headers)
        method, path = scope["method"], scope["path"]
        if not self._keys:
            return Caller(admin=True)
        if (("GET" if method == "HEAD" else method), path) in self._open:
            return caller or Caller()
        if caller is None:
            text = "the API key is not known here" if key else "an API key is needed: Authorization: Bearer KEY, or x-api-key"
            raise RequestError(text, code="invalid_api_key", status=401)
        if path.startswith(ADMIN) and not caller.admin:
            raise RequestError("this key may not use admin routes", code="forbidden", status=403)
        return caller

    async def _refuse(self, scope: Scope, error: RequestError, send: Send) -> None:
        body, headers = body_for(scope["path"], error), error_headers(error)
        if error.status == 401:
            if self._has_page and asks_for_page(scope["method"], scope["path"], Headers(scope=scope)):
                body, headers = form(), FORM_HEADERS
            headers = {**headers, "www-authenticate": "Bearer"}
        await send(head_of(error.status, {**headers, "connection": "close"}, body))
        await send({"type": "http.response.body", "body": body})

    def _check_origin(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._hosts and _hostname(host) not in self._hosts:
            text = f"the server is not known as {host[:100]!r}; name it in security.hosts"
            raise RequestError(text, code="wrong_host", status=421)
        origin = headers.get("origin")
        if origin is not None and _place_of(origin) != host.lower():
            raise RequestError("requests from pages of other sites are refused", code="cross_origin", status=403)


def _session_in(headers: Mapping[str, str]) -> str:
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie else ""


def _place_of(origin: str) -> str | None:
    """Name and port in an `Origin`; None for what is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _hostname(host: str) -> str:
    """`host` without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def keys_at(host: str, key_file: str, single: str, *, keyless: bool) -> KeyRing:
    """The keys of a server that listens on `host`: those in a file, and one that was given by itself.

    Raises ConfigError if there are none although others than this machine could reach it and that is not meant (`keyless`), or
    FileFormatError naming the file.
    """
    keys = KeyRing.open(key_file, single)
    if not keys and host not in LOOPBACK and not keyless:
        raise ConfigError(
            f"there is no API key, and anyone who reaches {host} could ask for work. Set {KEY_VARIABLE} or security.key_file "
            "(`rackserve key` makes one), or security.keyless=true if that is meant"
        )
    return keys


def names_at(host: str, given: Iterable[str]) -> frozenset[str]:
    """Names under which a server on `host` may be addressed: on loopback only its own, elsewhere any (empty) unless some are
    given."""
    names = {name.lower() for name in given}
    return frozenset({host.lower(), *LOOPBACK, *names}) if names or host in LOOPBACK else frozenset()
