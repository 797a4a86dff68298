"""Requests that wait for a place, in the order they came; more than a few of them is a refusal at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from rackserve.api.errors import failure
from rackserve.relay.placer import Booking
from rackserve.route.limits import Refusal

Try = Callable[[], Booking | Refusal]
_Waiter = tuple[str, Try, asyncio.Future[Booking]]


class WaitingLine:
    """`most` requests wait at most `wait_s` seconds each. `end`: gives back a place whose taker left meanwhile.

    Of one group whoever came first is placed first, so a large request is not passed for ever by small ones. Groups, such as
    models that other workers serve, do not wait for each other.
    """

    __slots__ = ("_end", "_line", "_most", "_wait_s")

    def __init__(self, most: int, wait_s: float, end: Callable[[Booking], object]) -> None:
        self._line: deque[_Waiter] = deque()
        self._most = most
        self._wait_s = wait_s
        self._end = end

    def __len__(self) -> int:
        return len(self._line)

    async def enter(self, group: str, place: Try) -> Booking:
        """A place as soon as `place` finds one. Raises RequestError: 503 if no worker could take it, 429 if too many wait or it
        took too long.
        """
        found = None if any(waiting == group for waiting, _, _ in self._line) else place()
        if isinstance(found, Booking):
            return found
        if found is not None and found.code != "overloaded":
            raise failure(found.code, found.detail)
        if len(self._line) >= self._most:
            raise failure("overloaded", f"{len(self._line)} requests wait for a worker; try again later")
        waiter: asyncio.Future[Booking] = asyncio.get_running_loop().create_future()
        entry = (group, place, waiter)
        self._line.append(entry)
        try:
            async with asyncio.timeout(self._wait_s):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._end(waiter.result())  # placed in the very moment it gave up
            elif entry in self._line:
                self._line.remove(entry)
            if isinstance(error, TimeoutError):
                raise failure("overloaded", f"no worker had room for {self._wait_s:g} seconds; try again later") from None
            raise

    def wake(self) -> None:
        """Room may have come up."""
        full: set[str] = set()
        for entry in list(self._line):
            group, place, waiter = entry
            if group in full:
                continue
            if not waiter.done():
                found = place()
                if isinstance(found, Booking):
                    waiter.set_result(found)
                elif found.code == "overloaded":
                    full.add(group)
                    continue
                else:
                    waiter.set_exception(failure(found.code, found.detail))
            self._line.remove(entry)
