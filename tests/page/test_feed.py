from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from rackserve.api.call import Caller
from rackserve.page import feed as feed_module
from rackserve.page.feed import Feed
from rackserve.page.view import RackView
from tests.api.rig import run
from tests.page.rig import CURVE, RANKS


class Reader:
    """An ASGI client of a feed. `slow` delays each part it takes; it leaves when `gone` is set."""

    def __init__(self, feed: Feed, caller: Caller | None = None) -> None:
        self.parts: list[bytes] = []
        self.status = 0
        self.gone = asyncio.Event()
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.task = asyncio.create_task(feed({"type": "http", "method": "GET", "caller": caller}, self.receive, self.send))  # type: ignore[arg-type]

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        await self.may_take.wait()
        self.parts.append(message["body"])

    async def has(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.parts) < count:
                await asyncio.sleep(0)


def view() -> RackView:
    made = RackView(0)
    made.look = lambda: (RANKS, None)
    return made


def decoded(part: bytes) -> tuple[str, Any]:
    name, data = part.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: "))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "FRAME_S", 0.01)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        await scene()

    run(all_of_it())


def test_a_reader_hears_where_it_stood_then_frames_and_leaves_nothing_behind() -> None:
    async def scene() -> None:
        feed = Feed(view(), CURVE)
        reader = Reader(feed, Caller("team", False, "person"))
        await reader.has(3)
        (first, begin), (second, frame) = map(decoded, reader.parts[:2])
        assert (reader.status, first, second, feed.num_readers) == (200, "begin", "frame", 1)
        assert begin["signed_in"] is True and begin["frontier"] == [[20, 1600], [50, 900], [70, 300]]
        assert [rank["rank"] for rank in frame["ranks"]] == ["prefill0.0", "prefill1.0", "decode0.0"]
        reader.gone.set()
        await reader.task
        assert feed.num_readers == 0

    play(scene)


def test_a_slow_reader_misses_frames_and_holds_up_nobody() -> None:
    async def scene() -> None:
        feed = Feed(view())
        slow, quick_one = Reader(feed), Reader(feed)
        slow.may_take.clear()
        await quick_one.has(10)
        slow.may_take.set()
        await slow.has(2)
        assert len(slow.parts) < 5 < len(quick_one.parts)
        slow.gone.set()
        quick_one.gone.set()
        await asyncio.gather(slow.task, quick_one.task)

    play(scene)


def test_a_reader_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "STALLED_S", 0.02)

    async def scene() -> None:
        feed = Feed(view())
        reader = Reader(feed)
        await reader.has(2)
        reader.may_take.clear()
        async with asyncio.timeout(5):
            await reader.task
        assert feed.num_readers == 0

    play(scene)


def test_too_many_readers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_READERS", 1)

    async def scene() -> None:
        feed = Feed(view())
        reader, refused = Reader(feed), Reader(feed)
        await refused.task
        assert (reader.status, refused.status, feed.num_readers) == (200, 503, 1)
        reader.gone.set()
        await reader.task

    play(scene)


def test_who_asks_for_the_head_alone_is_not_kept_waiting() -> None:
    async def scene() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async with asyncio.timeout(5):
            await Feed(view())({"type": "http", "method": "HEAD"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        assert [message.get("status", message.get("body")) for message in sent] == [200, b""]

    play(scene)


def test_the_feed_ends_with_the_server() -> None:
    async def scene() -> None:
        ending = False
        reader = Reader(Feed(view(), ending=lambda: ending))
        await reader.has(2)
        ending = True
        async with asyncio.timeout(5):
            await reader.task
        assert reader.parts[-1] == b"" and decoded(reader.parts[0])[1]["signed_in"] is False

    play(scene)
