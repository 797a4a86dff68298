from __future__ import annotations

import asyncio
import threading

import pytest

from rackserve.api.ask import Ask
from rackserve.api.call import Call, Caller
from rackserve.api.desk import Desk
from rackserve.api.dialects.completions import Completions
from rackserve.api.factory import Limits, RequestFactory
from rackserve.base.errors import RequestError
from tests.api.rig import NAMESPACE, run
from tests.text.small_model import small_tokenizer

BODY = b'{"prompt": "a"}'


class Slow(RequestFactory):
    """Waits for `go` before it works, and knows how many worked at once."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(small_tokenizer(), NAMESPACE, max_model_len=64, models=("tiny",), limits=limits)
        self.go = threading.Event()
        self.at_once = self.most = 0
        self.lock = threading.Lock()

    def prepare(self, ask: Ask, caller: Caller) -> Call:
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        assert self.go.wait(10)
        with self.lock:
            self.at_once -= 1
        return super().prepare(ask, caller)


def test_the_loop_turns_while_bodies_are_read_and_the_excess_is_refused_at_once() -> None:
    async def scene() -> None:
        factory = Slow(Limits(preparing=3, threads=2))
        desk = Desk(factory)
        waiting = [asyncio.create_task(desk.prepare(BODY, {}, Completions(), Caller())) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as caught:
            await desk.prepare(BODY, {}, Completions(), Caller())
        assert (caught.value.code, caught.value.status) == ("overloaded", 429)
        assert not any(task.done() for task in waiting)
        factory.go.set()
        assert len(await asyncio.gather(*waiting)) == 3 and factory.most <= 2
        await desk.prepare(BODY, {}, Completions(), Caller())
        desk.close()

    run(scene())


def test_a_client_that_leaves_the_queue_gives_its_place_back() -> None:
    async def scene() -> None:
        factory = Slow(Limits(preparing=2, threads=1))
        desk = Desk(factory)
        running, queued = (asyncio.create_task(desk.prepare(BODY, {}, Completions(), Caller())) for _ in range(2))
        await asyncio.sleep(0)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        third = asyncio.create_task(desk.prepare(BODY, {}, Completions(), Caller()))
        await asyncio.sleep(0)
        assert not third.done()
        factory.go.set()
        await asyncio.gather(running, third)
        desk.close()

    run(scene())


def test_a_refused_body_gives_its_place_back() -> None:
    async def scene() -> None:
        factory = Slow(Limits(preparing=1, threads=1))
        factory.go.set()
        desk = Desk(factory)
        for _ in range(3):
            with pytest.raises(RequestError, match="prompt"):
                await desk.prepare(b"{}", {}, Completions(), Caller())
        desk.close()

    run(scene())
