from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
import pytest

from rackserve.bench.wire import LeanTransport

T = TypeVar("T")
Piece = bytes | float
"""What a server writes, or how long it waits."""


async def with_server(answers: list[list[Piece]], use: Callable[[str], Awaitable[T]]) -> tuple[T, list[int]]:
    """Serve `answers` in turn, on any connection; the result of `use`, and the connection each request came on."""
    seen: list[int] = []
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        number = connections
        connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                seen.append(number)
                for piece in answers[len(seen) - 1]:
                    if isinstance(piece, float):
                        await asyncio.sleep(piece)
                    elif piece == b"":
                        writer.close()
                        return
                    else:
                        writer.write(piece)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return await asyncio.wait_for(use(url), 10), seen


def fetch(*answers: list[Piece]) -> tuple[list[bytes | str], list[int]]:
    """Bodies (or kinds of failure) of one request after the other over one client, and the connections they came on."""

    async def use(url: str) -> list[bytes | str]:
        got: list[bytes | str] = []
        async with httpx.AsyncClient(transport=LeanTransport(), timeout=None) as client:
            for _ in answers:
                try:
                    got.append((await client.post(f"{url}/path?x=1", content=b"body")).content)
                except httpx.HTTPError as error:
                    got.append(type(error).__name__)
        return got

    return asyncio.run(with_server(list(answers), use))


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def test_bodies_of_every_framing_are_read_and_whole_answers_share_a_connection() -> None:
    chunks = [CHUNKED + b"3\r\nabc", 0.01, b"\r\n4;x=y\r\ndefg\r\n0\r\ntrail: er\r\n\r\n"]
    sized = [HEAD + b"content-length: 5\r\n\r\nab", 0.01, b"cde"]
    empty: list[Piece] = [HEAD + b"content-length: 0\r\n\r\n"]
    until_close = [HEAD + b"\r\nabc", 0.01, b"def", b""]
    got, connections = fetch(chunks, sized, empty, until_close, empty)
    assert got == [b"abcdefg", b"abcde", b"", b"abcdef", b""]
    assert connections == [0, 0, 0, 0, 1]


def test_an_answer_that_ends_with_its_connection_is_whole_if_it_came_together_with_its_head() -> None:
    assert fetch([HEAD + b"\r\nabc", b""]) == ([b"abc"], [0])


def test_an_interim_answer_says_nothing_and_a_closing_one_is_not_used_again() -> None:
    continued: list[Piece] = [b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: 2\r\nConnection: close\r\n\r\nok"]
    got, connections = fetch(continued, continued)
    assert (got, connections) == ([b"ok", b"ok"], [0, 1])


@pytest.mark.parametrize(
    "broken",
    [
        [CHUNKED + b"5\r\nab", b""],
        [CHUNKED + b"zz\r\n", b""],
        [HEAD + b"content-length: 5\r\n\r\nab", b""],
        [HEAD + b"content-length: many\r\n\r\nab", b""],
        [b"SMTP ready\r\n\r\n", b""],
        [b"HTTP/1.1 fine\r\n\r\n", b""],
        [HEAD + b"no colon\r\n\r\n", b""],
        [b"HTTP/1.1 200", b""],
        [b"x" * 70_000],
        [b""],
    ],
)
def test_a_broken_answer_is_a_failure_and_its_connection_is_given_up(broken: list[Piece]) -> None:
    got, connections = fetch(broken, [HEAD + b"content-length: 2\r\n\r\nok"])
    assert got == ["RemoteProtocolError", b"ok"]
    assert connections == [0, 1]


def test_nobody_listening_is_a_failure_to_connect() -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        async with httpx.AsyncClient(transport=LeanTransport()) as client:
            await client.get(f"http://127.0.0.1:{port}")

    with pytest.raises(httpx.ConnectError):
        asyncio.run(run())


def test_a_piece_is_stamped_when_it_arrives_and_not_when_it_is_read() -> None:
    ticks = 0

    def now() -> int:
        nonlocal ticks
        ticks += 1
        return ticks

    async def use(url: str) -> list[tuple[int, bytes]]:
        async with (
            httpx.AsyncClient(transport=LeanTransport(now), timeout=None) as client,
            client.stream("GET", url) as response,
        ):
            await asyncio.sleep(0.1)  # everything arrives meanwhile, in three segments
            arrived = response.extensions["arrived_ns"]
            return [(arrived(), piece) async for piece in response.aiter_raw()]

    answer: list[Piece] = [CHUNKED, 0.02, b"1\r\na\r\n", 0.02, b"1\r\nb\r\n1\r\nc\r\n0\r\n\r\n"]
    got, _ = asyncio.run(with_server([answer], use))
    assert got == [(2, b"a"), (3, b"bc")]
    assert ticks == 3


def test_an_answer_that_is_not_read_to_its_end_closes_its_connection() -> None:
    async def use(url: str) -> None:
        async with httpx.AsyncClient(transport=LeanTransport(), timeout=None) as client:
            async with client.stream("GET", url) as response:
                async for _ in response.aiter_raw():
                    break
            await client.get(url)

    answer: list[Piece] = [CHUNKED + b"1\r\na\r\n"]
    _, connections = asyncio.run(with_server([answer, [HEAD + b"content-length: 0\r\n\r\n"]], use))
    assert connections == [0, 1]


def test_chunks_that_came_together_are_given_together() -> None:
    answer: list[Piece] = [CHUNKED + b"1\r\na\r\n1\r\nb\r\n2\r\nc", 0.01, b"d\r\n1\r\ne\r\n0\r\n\r\n"]

    async def use(url: str) -> list[bytes]:
        async with httpx.AsyncClient(transport=LeanTransport(), timeout=None) as client, client.stream("GET", url) as response:
            return [piece async for piece in response.aiter_raw()]

    assert asyncio.run(with_server([answer], use))[0] == [b"ab", b"cde"]
