"""The bounded worker threads on which bodies are parsed, rendered and tokenised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from rackserve.api.errors import failure
from rackserve.api.factory import Call, RequestFactory


class Desk:
    """Runs `RequestFactory` off the event loop, so that a huge prompt delays neither health checks nor running streams."""

    __slots__ = ("_factory", "_places", "_pool")

    def __init__(self, factory: RequestFactory) -> None:
        self._factory = factory
        self._places = threading.BoundedSemaphore(factory.limits.preparing)
        self._pool = ThreadPoolExecutor(factory.limits.threads, thread_name_prefix="prepare")

    async def prepare(self, raw: bytes, headers: Mapping[str, str], *, chat: bool) -> Call:
        """The call in `raw`. Raises RequestError: the factory's, or code `overloaded` at once when too many are waiting."""
        if not self._places.acquire(blocking=False):
            raise failure("overloaded", f"{self._factory.limits.preparing} requests are waiting to be read (limits.preparing)")
        work = self._factory.chat if chat else self._factory.completion
        future = self._pool.submit(work, raw, headers)
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def _leave(self, _: Future[Call]) -> None:
        self._places.release()

    def close(self) -> None:
        """Let the threads end; calls still waiting are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
