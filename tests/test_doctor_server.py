from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from rackserve.api.keys import KEY_VARIABLE
from rackserve.cli import main
from rackserve.doctor_server import Finding, examine_server, is_rackserve

MODELS = {"data": [{"id": "m", "max_model_len": 4096}]}
UP = {"worker": "decode0", "state": "up"}
READY = {"live": True, "ready": True, "phase": "ready", "open_requests": 2, "ranks": [UP]}


class Server:
    """What a server says, reached through an httpx transport."""

    def __init__(self, health: Any = READY, models: Any = MODELS, status: int = 200, answer: int = 200, key: str = "") -> None:
        self.health, self.models, self.status, self.answer, self.key = health, models, status, answer, key

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401)
        if request.url.path == "/health":
            return httpx.Response(200, text=self.health if isinstance(self.health, str) else json.dumps(self.health))
        if request.url.path == "/v1/models":
            return httpx.Response(self.status, text=self.models if isinstance(self.models, str) else json.dumps(self.models))
        assert json.loads(request.content) == {"model": "m", "prompt": [1], "max_tokens": 1}
        return httpx.Response(self.answer, text="broken")


def look(server: Any, key: str = "", url: str = "http://rack:8000/v1/") -> dict[str, Finding]:
    return {each.what: each for each in examine_server(url, key, httpx.MockTransport(server))}


def test_a_server_that_works_is_looked_at_to_its_first_token() -> None:
    found = look(Server(key="k"), "k")
    assert list(found) == ["address", "key", "health", "ranks", "models", "answer"]
    assert {each.verdict for each in found.values()} == {"ok"}
    assert "m (context 4096)" in found["models"].text and "2 requests open" in found["health"].text


def raising(error: Exception) -> Any:
    def answer(_: httpx.Request) -> httpx.Response:
        raise error

    return answer


@pytest.mark.parametrize(
    ("server", "key", "what", "verdict", "says"),
    [
        (raising(httpx.ConnectError("refused")), "", "address", "bad", "is the server running"),
        (raising(httpx.ConnectTimeout("slow")), "", "address", "bad", "firewall"),
        (raising(httpx.RemoteProtocolError("odd")), "", "address", "bad", "http or https"),
        (Server(key="k"), "", "key", "bad", f"put it into {KEY_VARIABLE}"),
        (Server(key="k"), "other", "key", "bad", "does not know the key"),
        (Server(status=421), "", "key", "bad", "not known as rack; add that name to its security.hosts"),
        (Server({"ready": False, "phase": "loading"}, status=503), "", "health", "bad", "being loaded"),
        (Server({**READY, "phase": "draining"}), "", "health", "bad", "shutting down"),
        (
            Server({**READY, "phase": "stuck", "stuck": {"where": "decode", "seconds": 41}}),
            "",
            "health",
            "bad",
            "41 s at decode",
        ),
        (Server({**READY, "phase": "unavailable"}), "", "health", "bad", "no rank or worker is up"),
        (Server({**READY, "ranks": [UP, {"worker": "p0", "state": "failed"}]}), "", "ranks", "note", "p0 is failed"),
        (Server({"ready": True, "workers": [{"worker": "a:1", "up": False}]}), "", "ranks", "note", "a:1 is down"),
        (Server(""), "", "health", "note", "another kind"),
        (Server(models="<html>"), "", "models", "bad", "OpenAI-compatible"),
        (Server(models={"data": []}), "", "models", "bad", "no model"),
        (Server(answer=500), "", "answer", "bad", "HTTP 500: broken"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(server: Any, key: str, what: str, verdict: str, says: str) -> None:
    found = look(server, key)
    assert (found[what].verdict, says in found[what].text) == (verdict, True), found
    assert all(each.verdict != "bad" for each in found.values() if each.what != what)


@pytest.mark.parametrize("url", ["rack", "", "ftp://rack", "http://[::1", "http://rack:x"])
def test_what_is_no_address_is_said_so(url: str) -> None:
    (found,) = examine_server(url)
    assert found.verdict == "bad" and "is no address" in found.text


@pytest.mark.parametrize(("told", "is_one"), [({"ready": False}, True), ({"status": "ok"}, False), ([], False), (None, False)])
def test_a_rackserve_is_known_by_how_it_tells_its_health(told: object, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(url: str, **_: object) -> httpx.Response:
        if told is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=told)

    monkeypatch.setattr(httpx, "get", get)
    assert is_rackserve("http://127.0.0.1:8000") is is_one


def test_the_command_says_that_nobody_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["doctor", "--url", f"http://127.0.0.1:{port}"]) == 4
    out = capsys.readouterr().out
    assert out.startswith("bad   address  nobody answers at http://127.0.0.1:") and "is the server running" in out
    assert out.endswith("1 to mend before the server at --url can be used\n")
