from __future__ import annotations

import asyncio
import threading

import pytest

from rackserve.api.desk import Desk
from rackserve.api.limits import Limits
from rackserve.base.errors import RequestError
from tests.api.rig import run


class Slow:
    """Work that waits for `go`, and knows how many worked at once."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.at_once = self.most = 0
        self.lock = threading.Lock()

    def __call__(self) -> int:
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        assert self.go.wait(10)
        with self.lock:
            self.at_once -= 1
        return 7


def fails() -> None:
    raise RequestError("prompt must not be empty")


def test_the_loop_turns_while_work_is_done_and_the_excess_is_refused_at_once() -> None:
    async def scene() -> None:
        slow, desk = Slow(), Desk(Limits(preparing=3, threads=2))
        waiting = [asyncio.create_task(desk.run(slow)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as caught:
            await desk.run(slow)
        assert (caught.value.code, caught.value.status) == ("overloaded", 429)
        assert not any(task.done() for task in waiting)
        slow.go.set()
        assert await asyncio.gather(*waiting) == [7] * 3 and slow.most <= 2
        assert await desk.run(slow) == 7
        desk.close()

    run(scene())


def test_a_client_that_leaves_the_queue_gives_its_place_back() -> None:
    async def scene() -> None:
        slow, desk = Slow(), Desk(Limits(preparing=2, threads=1))
        running, queued = (asyncio.create_task(desk.run(slow)) for _ in range(2))
        await asyncio.sleep(0)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        third = asyncio.create_task(desk.run(slow))
        await asyncio.sleep(0)
        assert not third.done()
        slow.go.set()
        await asyncio.gather(running, third)
        desk.close()

    run(scene())


def test_work_that_fails_gives_its_place_back() -> None:
    async def scene() -> None:
        desk = Desk(Limits(preparing=1, threads=1))
        for _ in range(3):
            with pytest.raises(RequestError, match="prompt"):
                await desk.run(fails)
        desk.close()

    run(scene())
