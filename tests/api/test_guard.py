from __future__ import annotations

import hashlib
import logging
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from rackserve.api.call import Caller
from rackserve.api.guard import COOKIE, MAX_SESSIONS, OPEN, Guard, Sessions
from rackserve.api.journal import RefusalLog
from rackserve.api.keys import KeyEntry, KeyRing
from rackserve.api.logs import FIELDS
from tests.api.rig import Rig, run, text

KEYS = KeyRing(
    [
        KeyEntry("user", hashlib.sha256(b"u").hexdigest(), "team"),
        KeyEntry("root", hashlib.sha256(b"r").hexdigest(), admin=True),
    ]
)


class Inside:
    """The application behind the guard: it tells whom it got."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.callers.append(scope["caller"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})


def knock(method: str, path: str, headers: Any = None, keys: KeyRing = KEYS, **settings: Any) -> tuple[int, Inside]:
    async def scene() -> tuple[int, Inside]:
        inside = Inside()
        guard = Guard(inside, keys, settings.pop("sessions", Sessions()), **settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://rig") as client:
            return (await client.request(method, path, headers=headers)).status_code, inside

    return run(scene())


def test_every_route_of_the_application_needs_a_key_but_the_written_list() -> None:
    async def scene() -> list[tuple[str, str]]:
        return [(m, r.path) for r in Rig(text("x")).app.routes if isinstance(r, Route) for m in r.methods or {"GET", "POST"}]

    routes = run(scene())
    assert len(routes) > 8
    for method, path in [*routes, ("DELETE", "/health"), ("OPTIONS", "/v1/models"), ("GET", "/new")]:
        opened = (("GET" if method == "HEAD" else method), path) in OPEN
        assert knock(method, path)[0] == (200 if opened else 401), (method, path)
        assert knock(method, path, {"authorization": "Bearer wrong"})[0] == (200 if opened else 401)
        assert knock(method, path, {"authorization": "Bearer u"})[0] == 200


def test_an_open_path_is_told_who_asks_so_that_it_can_keep_details_from_strangers() -> None:
    for key, caller in {"u": Caller("team", False, "user"), "wrong": Caller(), "": Caller()}.items():
        assert knock("GET", "/health", {"x-api-key": key})[1].callers == [caller]
    assert knock("GET", "/health", keys=KeyRing([]))[1].callers == [Caller(admin=True)]


SPELLINGS = ["//health", "/health/", "/Health", "/v1/../health", "/health\0", "/health/x", "/v1/models/", "//v1/models", ""]


@pytest.mark.parametrize("path", SPELLINGS)
def test_no_spelling_of_a_path_gets_around_the_key(path: str) -> None:
    async def scene() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        await Guard(Inside(), KEYS, Sessions())(scope, None, send)  # type: ignore[arg-type]
        return sent

    assert run(scene())[0]["status"] == 401


def test_a_key_names_its_tenant_and_only_some_are_admins() -> None:
    assert knock("GET", "/v1/models", {"x-api-key": "u"})[1].callers == [Caller("team", False, "user")]
    assert knock("POST", "/admin/drain", {"x-api-key": "u"})[0] == 403
    assert knock("POST", "/admin/drain", {"x-api-key": "r"})[0] == 200


@pytest.mark.parametrize("headers", [{"host": "rig"}, {"host": "rig", "origin": "http://evil"}])
def test_the_log_names_the_key_of_what_the_door_refuses(headers: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        app = RefusalLog(Guard(Inside(), KEYS, Sessions()), [].append)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rig") as client:
            assert (await client.post("/admin/drain", headers={**headers, "x-api-key": "u"})).status_code == 403

    caplog.set_level(logging.INFO, "rackserve.requests")
    run(scene())
    (record,) = caplog.records
    fields = getattr(record, FIELDS)
    assert (fields["status"], fields["key"]) == (403, "user")


def test_without_keys_everyone_is_the_only_tenant() -> None:
    assert knock("POST", "/admin/drain", keys=KeyRing([]))[1].callers == [Caller(admin=True)]


def test_metrics_may_be_opened() -> None:
    assert knock("GET", "/metrics", open_metrics=True)[0] == 200 and knock("POST", "/metrics", open_metrics=True)[0] == 401


def test_a_session_stands_for_the_key_until_it_ends_and_their_number_is_bounded() -> None:
    sessions = Sessions()
    name = sessions.begin(Caller("team"))
    assert knock("GET", "/v1/models", {"cookie": f"{COOKIE}={name}"}, sessions=sessions)[1].callers == [Caller("team")]
    for cookie in (f"{COOKIE}=x", "garbage;;=", f"other={name}", ""):
        assert knock("GET", "/v1/models", {"cookie": cookie}, sessions=sessions)[0] == 401
    assert knock("GET", "/v1/models", {"cookie": f"{COOKIE}={name}", "x-api-key": "wrong"}, sessions=sessions)[0] == 401
    for _ in range(MAX_SESSIONS):
        sessions.begin(Caller())
    assert sessions.find({"cookie": f"{COOKIE}={name}"}) is None


def test_sessions_end_with_the_key_that_began_them() -> None:
    sessions = Sessions()
    cookies = {key: {"cookie": f"{COOKIE}={sessions.begin(Caller('team', False, key))}"} for key in ("gone", "kept")}
    sessions.end_of({"gone", "other"})
    assert sessions.find(cookies["gone"]) is None and sessions.find(cookies["kept"]) == Caller("team", False, "kept")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "rig"}, 200),
        ({"host": "RIG:80"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil"}, 421),
        ({"host": "rig.evil"}, 421),
        ({"host": "rig", "origin": "http://rig"}, 200),
        ({"host": "rig", "origin": "http://evil"}, 403),
        ({"host": "rig", "origin": "null"}, 403),
        ({"host": "rig", "origin": "http://[::1"}, 403),
        ({"host": "rig", **{f"x-{n}": "1" for n in range(101)}}, 431),
        ({"host": "rig", "x-big": "1" * 33_000}, 431),
    ],
)
def test_other_names_other_sites_and_giant_headers_are_refused(headers: dict[str, str], status: int) -> None:
    assert knock("GET", "/health", headers, hosts=frozenset({"rig", "::1"}))[0] == status


def test_a_refusal_has_the_form_of_its_dialect() -> None:
    async def body(path: str) -> Any:
        guard = Guard(Inside(), KEYS, Sessions())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://rig") as client:
            answer = await client.post(path)
            assert answer.headers["www-authenticate"] == "Bearer"
            return answer.json()

    assert run(body("/v1/messages"))["error"]["type"] == "authentication_error"
    assert run(body("/v1/chat/completions"))["error"]["code"] == "invalid_api_key"
