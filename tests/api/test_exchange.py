from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rackserve.api.dialects.dialect import Event
from rackserve.api.exchange import ClientGone, Exchange
from rackserve.api.limits import Limits
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
        self.exchange = Exchange({"type": "http", "path": "/", "headers": raw}, self.receive, self.send, LIMITS)

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


def test_a_client_that_takes_no_part_of_a_stream_runs_out_of_patience() -> None:
    async def scene() -> None:
        peer = Peer()
        exchange = peer.exchange
        await exchange.send_events([Event(b"0")])
        assert exchange.patience() == LIMITS.send_s
        peer.deaf = True
        sending = asyncio.create_task(exchange.send_events([Event(b"1")]))
        while exchange.patience() > 0:
            await asyncio.sleep(0)
        assert not sending.done()
        sending.cancel()

    run(scene())


def test_the_first_part_brings_the_headers_and_names_have_their_line() -> None:
    peer = Peer()

    async def scene() -> None:
        await peer.exchange.send_events([Event(b'{"a":1}')])
        await peer.exchange.send_events([Event(b"2", "ping"), Event(b"3")])
        assert peer.exchange.patience() == LIMITS.send_s
        await peer.exchange.send_events([Event(b"4")], last=True)

    run(scene())
    assert peer.sent[0]["status"] == 200
    parts = [b'data: {"a":1}\n\n', b"event: ping\ndata: 2\n\ndata: 3\n\n", b"data: 4\n\n"]
    assert [message["body"] for message in peer.sent[1:]] == parts
    assert [message["more_body"] for message in peer.sent[1:]] == [True, True, False]
