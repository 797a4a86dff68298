from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from rackserve.api.guard import Guard, Sessions
from rackserve.page.form import FORM_HEADERS, asks_for_page, form
from tests.api.rig import run
from tests.page.rig import KEYS

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def refused(method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    async def inside(*_: Any) -> None:
        pytest.fail("let in")

    async def scene() -> httpx.Response:
        transport = httpx.ASGITransport(Guard(inside, KEYS, Sessions()))
        async with httpx.AsyncClient(transport=transport, base_url="http://rig") as client:
            return await client.request(method, path, headers=headers)

    return run(scene())


def test_a_browser_without_a_key_gets_the_form_with_a_401() -> None:
    answer = refused("GET", "/", HTML)
    assert answer.status_code == 401 and '<form method="post" action="/login">' in answer.text
    assert answer.headers["content-type"].startswith("text/html") and answer.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(("method", "path", "headers"), [("GET", "/", {}), ("POST", "/", HTML), ("GET", "/v1/models", HTML)])
def test_a_program_without_a_key_gets_an_error(method: str, path: str, headers: dict[str, str]) -> None:
    answer = refused(method, path, headers)
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert not asks_for_page(method, path, Headers(headers))


def test_the_style_of_the_form_is_the_one_that_its_policy_allows() -> None:
    style = re.search(r"<style>(.*)</style>", form().decode())
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in FORM_HEADERS["content-security-policy"]
    assert "<script" not in form().decode() and "default-src 'none'" in FORM_HEADERS["content-security-policy"]


def test_what_went_wrong_is_text() -> None:
    assert b'role="alert">&lt;b&gt;' in form("<b>") and b"alert" not in form()
