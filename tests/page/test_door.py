from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Message

from rackserve.api.guard import COOKIE, Guard, Sessions
from rackserve.page import door as door_module
from rackserve.page.door import MAX_FORM_BYTES, Door
from tests.api.rig import run
from tests.page.rig import KEY, KEYS

Scene = Callable[[httpx.AsyncClient], Awaitable[None]]


def with_client(scene: Scene, base_url: str = "http://rig") -> None:
    async def play() -> None:
        sessions = Sessions()
        door = Door(KEYS, sessions)
        routes = [Route("/login", door.login, methods=["POST"]), Route("/logout", door.logout, methods=["POST"])]
        transport = httpx.ASGITransport(Guard(Starlette(routes=routes), KEYS, sessions))
        async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
            await scene(client)

    run(play())


def test_a_key_buys_a_cookie_that_scripts_and_other_sites_cannot_use() -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        answer = await client.post("/login", data={"key": f" {KEY} "})
        cookie = answer.headers["set-cookie"]
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie and "Secure" not in cookie
        assert KEY not in cookie and KEY not in answer.text

    with_client(scene)


def test_over_tls_the_cookie_stays_there() -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        assert "Secure" in (await client.post("/login", data={"key": KEY})).headers["set-cookie"]

    with_client(scene, "https://rig")


@pytest.mark.parametrize(
    "body", [b"", b"key=", b"key=wrong", b"other=rk-right", b"key=%ff", b"\xff", b"&a=1" * 20, b"key[]=rk-right"]
)
def test_without_a_known_key_the_form_asks_again(body: bytes) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        answer = await client.post("/login", content=body)
        assert answer.status_code == 401 and "not known" in answer.text and "set-cookie" not in answer.headers

    with_client(scene)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_form_that_does_not_come_is_not_waited_for(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "FORM_S", 0.05)

    async def receive() -> Message:
        if leaves:
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()
        raise AssertionError

    async def play() -> None:
        request = Request({"type": "http", "method": "POST", "path": "/login", "headers": []}, receive)
        async with asyncio.timeout(5):
            assert (await Door(KEYS, Sessions()).login(request)).status_code == 408

    run(play())


def test_a_long_form_is_not_read() -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        assert (await client.post("/login", content=b"k" * (MAX_FORM_BYTES + 1))).status_code == 413

    with_client(scene)


def test_a_page_of_another_site_cannot_sign_anybody_in() -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        answer = await client.post("/login", data={"key": KEY}, headers={"origin": "http://evil"})
        assert answer.status_code == 403 and "set-cookie" not in answer.headers

    with_client(scene)


def test_who_signs_out_needs_a_key_again_even_with_the_old_cookie() -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        await client.post("/login", data={"key": KEY})
        old = client.cookies[COOKIE]
        assert (await client.get("/elsewhere")).status_code == 404
        answer = await client.post("/logout")
        assert (answer.status_code, answer.headers["location"], COOKIE in client.cookies) == (303, "/", False)
        client.cookies.set(COOKIE, old)
        assert (await client.get("/elsewhere")).status_code == 401

    with_client(scene)
