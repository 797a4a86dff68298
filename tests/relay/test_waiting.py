"""Requests wait in order, in bounds, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rackserve.base.errors import RequestError
from rackserve.base.ids import Rank
from rackserve.relay.placer import Booking
from rackserve.relay.prompts import Call
from rackserve.relay.waiting import WaitingLine
from rackserve.route.limits import Refusal

FULL = Refusal("overloaded", "full")


class Rig:
    """A line before `room` places."""

    def __init__(self, room: int, *, most: int = 3, wait_s: float = 5.0) -> None:
        self.room = room
        self.placed: list[str] = []
        self.given_back: list[Booking] = []
        self.line = WaitingLine(most, wait_s, self.given_back.append)

    def try_for(self, name: str, why: Refusal = FULL) -> Callable[[], Booking | Refusal]:
        def place() -> Booking | Refusal:
            if not self.room:
                return why
            self.room -= 1
            self.placed.append(name)
            return Booking(("", 1), Rank("w"), None, Call("", "", b"", 1), 0, 0)

        return place

    def enter(self, name: str, group: str = "") -> asyncio.Task[Booking]:
        return asyncio.create_task(self.line.enter(group, self.try_for(name)))

    def free(self, room: int = 1) -> None:
        self.room += room
        self.line.wake()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))  # type: ignore[arg-type]


def test_who_came_first_is_placed_first() -> None:
    async def test() -> None:
        rig = Rig(1)
        tasks = []
        for name in "abc":
            tasks.append(rig.enter(name))
            await asyncio.sleep(0)
        assert rig.placed == ["a"]
        rig.free(1)
        assert rig.placed == ["a", "b"]
        rig.free(5)
        await asyncio.gather(*tasks)
        assert rig.placed == ["a", "b", "c"]
        assert len(rig.line) == 0

    run(test)


def test_nobody_passes_those_who_wait_even_if_there_is_room() -> None:
    async def test() -> None:
        rig = Rig(0)
        first = rig.enter("a")
        await asyncio.sleep(0)
        rig.room = 1
        second = rig.enter("b")
        await asyncio.sleep(0)
        assert rig.placed == []
        rig.line.wake()
        await first
        assert rig.placed == ["a"]
        second.cancel()

    run(test)


def test_too_many_are_refused_at_once() -> None:
    async def test() -> None:
        rig = Rig(0, most=2)
        waiting = [rig.enter(name) for name in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as caught:
            await rig.enter("c")
        assert caught.value.status == 429
        for task in waiting:
            task.cancel()

    run(test)


def test_a_wait_that_takes_too_long_is_refused_and_leaves_the_line() -> None:
    async def test() -> None:
        rig = Rig(0, wait_s=0.001)
        with pytest.raises(RequestError) as caught:
            await rig.enter("a")
        assert caught.value.status == 429
        assert len(rig.line) == 0

    run(test)


def test_without_a_worker_nobody_waits() -> None:
    async def test() -> None:
        rig = Rig(0)
        with pytest.raises(RequestError) as caught:
            await rig.line.enter("", rig.try_for("a", Refusal("unavailable", "none")))
        assert caught.value.status == 503

    run(test)


def test_who_leaves_while_waiting_takes_no_place() -> None:
    async def test() -> None:
        rig = Rig(0)
        gone, stays = rig.enter("a"), rig.enter("b")
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        rig.free()
        await stays
        assert rig.placed == ["b"]
        assert rig.given_back == []

    run(test)


def test_a_place_got_in_the_moment_of_leaving_is_given_back() -> None:
    async def test() -> None:
        rig = Rig(0)
        task = rig.enter("a")
        await asyncio.sleep(0)
        rig.free()  # placed, but the task has not run since
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert len(rig.given_back) == 1

    run(test)


def test_groups_do_not_wait_for_each_other() -> None:
    async def test() -> None:
        rig = Rig(0)
        blocked = rig.enter("a", "one")
        await asyncio.sleep(0)
        rig.room = 1
        await rig.enter("b", "two")
        assert rig.placed == ["b"]
        blocked.cancel()

    run(test)
