from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rackserve.api.exchange import ClientGone, Exchange
from rackserve.api.factory import Limits
from rackserve.base.errors import RequestError
from tests.api.rig import run

LIMITS = Limits(body_bytes=10, body_s=0.01, send_s=0.01)


class Peer:
    """What the server sends us and what we feed it; it waits for ever when out of messages."""

    def __init__(self, *messages: dict[str, Any], headers: dict[str, str] | None = None, deaf: bool = False) -> None:
        self.messages = list(messages)
        self.sent: list[dict[str, Any]] = []
        self.deaf = deaf
        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.exchange = Exchange({"type": "http", "headers": raw}, self.receive, self.send, LIMITS)

    async def receive(self) -> dict[str, Any]:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def send(self, message: Any) -> None:
        if self.deaf:
            await asyncio.Event().wait()
        self.sent.append(message)


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_in_parts_is_joined() -> None:
    assert run(Peer(part(b"abc", True), part(b"def")).exchange.body()) == b"abcdef"


@pytest.mark.parametrize(
    ("peer", "unread"),
    [
        (Peer(part(b"x" * 11)), 0),
        (Peer(part(b"x" * 6, True), part(b"x" * 6, True), part(b"y")), 0),
        (Peer(*[part(b"x" * 20, True)] * 5), 2),
        (Peer(part(b"x"), headers={"content-length": "41"}), 1),
    ],
)
def test_a_body_beyond_the_limit_is_refused_after_its_end_if_that_is_near(peer: Peer, unread: int) -> None:
    with pytest.raises(RequestError) as caught:
        run(peer.exchange.body())
    assert caught.value.status == 413 and len(peer.messages) == unread


def test_a_body_that_stalls_is_a_timeout() -> None:
    with pytest.raises(RequestError) as caught:
        run(Peer(part(b"a", True)).exchange.body())
    assert caught.value.status == 408


def test_a_client_that_leaves_in_mid_body_is_gone() -> None:
    with pytest.raises(ClientGone):
        run(Peer(part(b"a", True), {"type": "http.disconnect"}).exchange.body())


def test_a_client_that_takes_nothing_is_gone() -> None:
    with pytest.raises(ClientGone):
        run(Peer(deaf=True).exchange.reply(b"{}"))


def test_an_error_before_the_first_byte_is_an_http_error() -> None:
    peer = Peer()
    run(peer.exchange.fail(RequestError("no", status=503)))
    assert peer.sent[0]["status"] == 503 and (b"retry-after", b"1") in peer.sent[0]["headers"]
    assert len(peer.sent) == 2 and not peer.sent[1].get("more_body", False)


def test_an_error_in_a_stream_is_one_event_and_the_end() -> None:
    peer = Peer()

    async def scene() -> None:
        await peer.exchange.send_json_event({"a": 1})
        await peer.exchange.fail(RequestError("lost", status=503))

    run(scene())
    assert peer.sent[1]["body"] == b'data: {"a":1}\n\n'
    assert peer.sent[0]["status"] == 200 and peer.sent[2]["body"].startswith(b'data: {"error":')
    assert peer.sent[3] == {"type": "http.response.body", "body": b""} and len(peer.sent) == 4
