"""What of a request goes on, and how an answer that broke off is ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rackserve.api.limits import Limits
from rackserve.base.errors import RequestError
from rackserve.relay.door import Door
from rackserve.relay.passage import Passage


class Client:
    """What a client is sent."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []

    async def send(self, message: Any) -> None:
        self.got.append(message)

    async def receive(self) -> Any:
        return {"type": "http.disconnect"}

    def passage(self, *headers: tuple[bytes, bytes], path: str = "/v1/completions") -> Passage:
        scope = {"type": "http", "path": path, "headers": list(headers)}
        return Passage(scope, self.receive, self.send, Limits())

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


def test_only_what_belongs_to_the_connection_stays_behind() -> None:
    passage = Client().passage(
        (b"host", b"here"),
        (b"connection", b"close, X-Secret-Hop"),
        (b"x-secret-hop", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"5"),
        (b"x-data-parallel-rank", b"9"),
        (b"authorization", b"Bearer k"),
        (b"x-twice", b"1"),
        (b"x-twice", b"2"),
    )
    kept = [(b"authorization", b"Bearer k"), (b"x-twice", b"1"), (b"x-twice", b"2")]
    assert passage.passed_headers(None, Door()) == kept
    assert passage.passed_headers(3, Door()) == [*kept, (b"x-data-parallel-rank", b"3")]


@pytest.mark.parametrize("asked", [b"x", b"-1", b"1.0", b"\xb2", b"1234567"])
def test_a_rank_that_is_no_number_is_refused(asked: bytes) -> None:
    with pytest.raises(RequestError):
        _ = Client().passage((b"x-data-parallel-rank", asked)).dp_rank
    assert Client().passage((b"x-data-parallel-rank", b"12")).dp_rank == 12
    assert Client().passage().dp_rank is None


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/completions", b"data: {"),
        ("/v1/messages", b"event: error\ndata: {"),
        ("/v1/responses", b"event: error\ndata: {"),
    ],
)
def test_a_stream_cut_in_the_middle_of_an_event_ends_with_one_that_tells_so(path: str, said: bytes) -> None:
    async def test() -> None:
        client = Client()
        passage = client.passage(path=path)
        await passage.begin(200, [(b"content-type", b"text/event-stream")])
        await passage.pass_on(b'data: {"tex')
        await passage.break_off(RequestError("gone", code="worker_lost", status=502))
        assert client.body.split(b"\n\n")[-2].startswith(said)
        assert client.got[-1] == {"type": "http.response.body", "body": b""}

    asyncio.run(test())


def test_anything_else_cut_short_is_left_without_an_end() -> None:
    async def test() -> None:
        client = Client()
        passage = client.passage()
        await passage.begin(200, [(b"content-type", b"application/json")])
        await passage.pass_on(b"{")
        await passage.break_off(RequestError("gone"))
        assert client.got[-1]["more_body"] is True

    asyncio.run(test())


@pytest.mark.parametrize(
    ("path", "begin"),
    [
        ("/v1/completions", b'{"error":{"message":"no"'),
        ("/v1/responses", b'{"error":{"message":"no"'),
        ("/v1/messages", b'{"type":"error","error":{"type":"rate_limit_error"'),
    ],
)
def test_a_refusal_has_the_form_of_the_dialect(path: str, begin: bytes) -> None:
    async def test() -> None:
        client = Client()
        await client.passage(path=path).refuse(RequestError("no", code="overloaded", status=429))
        assert client.got[0]["status"] == 429
        assert (b"retry-after", b"1") in client.got[0]["headers"]
        assert client.body.startswith(begin)

    asyncio.run(test())
