"""One exchange with a worker: its bytes as they come, and a reason whenever they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rackserve.relay.breaker import Breaker
from rackserve.relay.config import WorkerConfig
from rackserve.relay.upstream import Upstream, WorkerFailed
from rackserve.relay.workers import Worker
from tests.relay.rig import run, until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

CHUNKED = b"HTTP/1.1 200 OK\r\nDate: x\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\n\r\n"


def asking(serve: Serve, check: Callable[[Upstream, Worker], Awaitable[None]]) -> None:
    """Run `check` against a server that does `serve` after each request's head."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def test() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        worker, upstream = Worker(WorkerConfig(f"http://127.0.0.1:{port}"), Breaker(1, 1, 1)), Upstream()
        worker.up = True
        await check(upstream, worker)
        await upstream.aclose()
        server.close()

    run(test)


def test_the_head_is_held_back_until_the_first_piece_is_there() -> None:
    go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        await go.wait()
        writer.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    async def check(upstream: Upstream, worker: Worker) -> None:
        async def ask() -> bytes:
            async with upstream.send(worker, "POST", "/x", [], b"{}", head_s=5, gap_s=5) as answer:
                assert answer.headers == [(b"x-a", b"1")]
                return await answer.whole()

        task = asyncio.create_task(ask())
        await until(lambda: bool(worker._waiting))
        assert not task.done()
        go.set()
        assert await task == b"abcde"
        assert not worker._waiting

    asking(serve, check)


@pytest.mark.parametrize("sent", [b"", b"nonsense\r\n\r\n", CHUNKED, CHUNKED + b"zz\r\n", b"HTTP/1.1 200 OK\r\ncontent-le"])
def test_what_is_no_beginning_of_an_answer_is_a_failure(sent: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)

    async def check(upstream: Upstream, worker: Worker) -> None:
        with pytest.raises(WorkerFailed):
            async with upstream.send(worker, "POST", "/x", [], b"", head_s=5, gap_s=5):
                pass

    asking(serve, check)


def test_silence_between_pieces_has_a_limit() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"1\r\na\r\n")
        await reader.read()

    async def check(upstream: Upstream, worker: Worker) -> None:
        async with upstream.send(worker, "POST", "/x", [], b"", head_s=5, gap_s=0.02) as answer:
            pieces = answer.all_pieces()
            got = [await anext(pieces)]
            with pytest.raises(WorkerFailed, match="nothing came"):
                await anext(pieces)
        assert got == [b"a"]

    asking(serve, check)


def test_an_exchange_left_early_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"1\r\na\r\n")
        await reader.read()
        closed.set()

    async def check(upstream: Upstream, worker: Worker) -> None:
        async with upstream.send(worker, "POST", "/x", [], b"", head_s=5, gap_s=5):
            pass
        await closed.wait()

    asking(serve, check)


def test_nobody_listening_is_a_failure_at_once() -> None:
    async def test() -> None:
        worker = Worker(WorkerConfig("http://127.0.0.1:9"), Breaker(1, 1, 1))
        with pytest.raises(WorkerFailed):
            async with Upstream().send(worker, "POST", "/x", [], b"", head_s=5, gap_s=5):
                pass

    run(test)
