from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx
import msgspec
import pytest

from rackserve.api.server import _TimedProtocol, listen, serve
from rackserve.base.errors import ResourceError
from tests.api.rig import Rig, Script, run, text
from tests.live.hostile import MIB, junk, resident_bytes, shout
from tests.text.small_model import byte_ids


def test_a_taken_port_is_a_clear_error() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port} on 127.0.0.1 is in use; choose another with --port"):
            listen("127.0.0.1", port)


def test_an_unknown_host_is_a_clear_error() -> None:
    with pytest.raises(ResourceError, match=r"no\.such\.host"):
        listen("no.such.host.invalid", 0)


class Live:
    """A server on a real socket."""

    def __init__(self, script: Script, grace_s: float = 10.0) -> None:
        self.rig = Rig(script)
        self.stop = asyncio.Event()
        listener = listen("127.0.0.1", 0)
        self.address = listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.drained = 0
        self.task = asyncio.create_task(
            serve(
                self.rig.app,
                listener,
                gateway=self.rig.gateway,
                state=self.rig.state,
                stop=self.stop,
                grace_s=grace_s,
                drain=self.drain,
            )
        )

    async def drain(self) -> None:
        self.drained += 1


BODY = {"prompt": "hi", "stream": True}


def test_a_stop_lets_running_streams_end_and_refuses_new_ones() -> None:
    async def scene() -> None:
        live = Live(Script(ids=tuple(byte_ids("ab")), hold=True))
        async with (
            httpx.AsyncClient(base_url=live.url) as client,
            client.stream("POST", "/v1/completions", json=BODY) as response,
        ):
            lines = response.aiter_lines()
            assert response.status_code == 200 and '"a"' in await anext(lines)
            live.stop.set()
            while live.drained == 0:
                await asyncio.sleep(0)
            refused = await client.post("/v1/completions", json=BODY)
            health = await client.get("/health")
            assert (refused.status_code, health.status_code, health.json()["draining"]) == (503, 503, True)
            assert not live.task.done()
            live.rig.gateway.cancel(live.rig.frontend.submitted[0].id)  # the rack ends the answer
            rest = [line async for line in lines]
            assert "error" in [line for line in rest if line][-1]
        await live.task
        with pytest.raises(OSError):
            socket.create_connection(live.address, 1)

    run(scene())


def test_at_the_limit_open_streams_end_with_an_error_event() -> None:
    async def scene() -> None:
        live = Live(Script(ids=tuple(byte_ids("ab")), hold=True), grace_s=0.05)
        async with (
            httpx.AsyncClient(base_url=live.url) as client,
            client.stream("POST", "/v1/completions", json=BODY) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            live.stop.set()
            rest = [line async for line in lines if line]
        assert "shutting down" in rest[-1] and "[DONE]" not in "".join(rest)
        await live.task
        assert len(live.rig.frontend.cancelled) == 1

    run(scene())


def test_a_closed_socket_cancels_the_request() -> None:
    async def scene() -> None:
        live = Live(Script(ids=tuple(byte_ids("ab")), hold=True))
        for streamed in (True, False):
            reader, writer = await asyncio.open_connection(*live.address)
            raw = b'{"prompt":"hi","stream":%s}' % (b"true" if streamed else b"false")
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw)
            writer.write(head + raw)
            if streamed:
                await reader.readuntil(b'"a"')
            await live.rig.frontend.held.wait()
            writer.close()
            while live.rig.gateway.num_open or not live.rig.frontend.cancelled:
                await asyncio.sleep(0.001)
            assert len(live.rig.frontend.cancelled) == 1
            live.rig.frontend.cancelled.clear()
            live.rig.frontend.held.clear()
        live.stop.set()
        await live.task

    run(scene())


def test_answers_over_a_real_socket_are_the_same_bytes() -> None:
    async def scene() -> None:
        live = Live(text("grüße 🦙", groups=(3,)))
        async with httpx.AsyncClient(base_url=live.url) as client:
            answer = await client.post("/v1/completions", json={"prompt": "hi"})
            assert answer.json()["choices"][0]["text"] == "grüße 🦙"
            assert "server" not in answer.headers
        live.stop.set()
        await live.task

    run(scene())


def test_a_head_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_TimedProtocol, "head_s", 0.05)

    async def scene() -> None:
        live = Live(Script(ids=tuple(byte_ids("ab"))))
        reader, writer = await asyncio.open_connection(*live.address)
        writer.write(b"GET /health HT")
        async with asyncio.timeout(10):
            assert await reader.read() == b"", "closed without an answer"
        writer.close()
        async with httpx.AsyncClient(base_url=live.url) as client:
            assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        live.stop.set()
        await live.task

    run(scene())


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"hello\r\n\r\n", 400, "invalid_http"),
        (b"GET /live HTTP/1.1\r\n\r\n", 400, "invalid_http"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_http"),
        (b"GET /live HTTP/1.1\r\nx: " + b"a" * 70_000, 431, "headers_too_large"),
    ],
)
def test_what_is_no_http_is_refused_like_everything_else(sent: bytes, status: int, code: str) -> None:
    async def scene() -> None:
        live = Live(text("ok"))
        reader, writer = await asyncio.open_connection(*live.address)
        writer.write(sent)
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.split()[1] == str(status).encode()
        assert msgspec.json.decode(body)["error"]["code"] == code
        live.stop.set()
        await live.task

    run(scene())


def test_junk_at_the_port_is_answered_or_cut_off_and_the_next_request_is_served(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    async def scene() -> None:
        live = Live(text("ok"))
        async with httpx.AsyncClient(base_url=live.url, trust_env=False) as client:
            assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
            memory = resident_bytes()
            heads = [b"GET /metrics HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n", b"\x00\r\n\r\n", b"G" * 200_000]
            heads += [b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n"]
            loud = [shout(*await asyncio.open_connection(*live.address), data) for data in (*junk(canary), *heads)]
            await asyncio.gather(*loud)
            assert resident_bytes() - memory < 32 * MIB
            assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        live.stop.set()
        await live.task

    run(scene())
    assert not canary.exists()
