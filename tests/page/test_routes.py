from __future__ import annotations

import re

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from rackserve.api.guard import OPEN, Sessions
from rackserve.api.keys import KeyRing
from rackserve.page.door import Door
from rackserve.page.feed import Feed
from rackserve.page.routes import STATIC, page_routes
from rackserve.page.view import RackView
from tests.api.rig import run

ROUTES = page_routes(Feed(RackView(0)), Door(KeyRing([]), Sessions()))
FILES = [route.path for route in ROUTES if route.path == "/" or "." in route.path]


def get(path: str) -> httpx.Response:
    async def scene() -> httpx.Response:
        transport = httpx.ASGITransport(Starlette(routes=list[Route](ROUTES)))
        async with httpx.AsyncClient(transport=transport, base_url="http://rig") as client:
            return await client.get(path)

    return run(scene())


@pytest.mark.parametrize("path", FILES)
def test_every_file_may_be_used_by_this_page_only_and_is_what_it_says(path: str) -> None:
    answer = get(path)
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200 and answer.content
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert (answer.headers["x-content-type-options"], answer.headers["x-frame-options"]) == ("nosniff", "DENY")
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].split(";")[0] == kinds.get(path.rpartition(".")[2], "text/html")


@pytest.mark.parametrize(
    "path", ["/page/../routes.py", "/page/%2e%2e/routes.py", "/page/", "/page/vendor/LICENSE.uplot", "/page/x.js"]
)
def test_nothing_else_is_served(path: str) -> None:
    assert get(path).status_code == 404


def test_only_signing_in_is_open_to_all() -> None:
    known = {(method, route.path) for route in ROUTES for method in route.methods or ()}
    assert known & OPEN == {("POST", "/login")} and ("GET", "/page/feed") in known


def test_the_page_names_only_its_own_files_and_makes_no_markup_of_text() -> None:
    own = [path for path in sorted(STATIC.rglob("*")) if path.is_file() and path.parent.name != "vendor"]
    assert len(own) > 8
    for path in own:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://[\w]", text), path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|sessionStorage|\son\w+=\"", text
        ), path
        for name in re.findall(r"[\"'](/page/[\w./-]+)[\"']", text):
            assert name in FILES or name == "/page/feed", (path, name)


def test_what_is_vendored_is_small_and_has_its_licence_and_version() -> None:
    vendor = {path.name: path.read_text(encoding="utf-8") for path in (STATIC / "vendor").iterdir()}
    assert sum(map(len, vendor.values())) < 100_000
    assert {"LICENSE.htm", "LICENSE.preact", "LICENSE.uplot"} < vendor.keys()
    notice = (STATIC.parent.parent.parent / "NOTICE").read_text(encoding="utf-8")
    assert "v1.6.32" in vendor["uplot.js"] and "uPlot 1.6.32" in notice and "htm 3.1.1" in notice
