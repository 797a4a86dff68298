"""The bounded worker threads on which bodies are parsed, rendered and tokenised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rackserve.api.errors import failure
from rackserve.api.limits import Limits

T = TypeVar("T")


class Desk:
    """Does heavy work off the event loop, so that a huge prompt delays neither health checks nor running streams."""

    __slots__ = ("_limits", "_places", "_pool")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places = threading.BoundedSemaphore(limits.preparing)
        self._pool = ThreadPoolExecutor(limits.threads, thread_name_prefix="prepare")

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises RequestError `overloaded` at once when too many wait."""
        if not self._places.acquire(blocking=False):
            raise failure("overloaded", f"{self._limits.preparing} requests are waiting to be read (limits.preparing)")
        future = self._pool.submit(work)
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def _leave(self, _: Future[Any]) -> None:
        self._places.release()

    def close(self) -> None:
        """Let the threads end; calls still waiting are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
