"""The bounded worker threads on which bodies are parsed, rendered and tokenised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from rackserve.api.call import Call, Caller
from rackserve.api.dialects.dialect import Dialect
from rackserve.api.errors import failure
from rackserve.api.factory import RequestFactory


class Desk:
    """Runs `RequestFactory` off the event loop, so that a huge prompt delays neither health checks nor running streams."""

    __slots__ = ("_factory", "_places", "_pool")

    def __init__(self, factory: RequestFactory) -> None:
        self._factory = factory
        self._places = threading.BoundedSemaphore(factory.limits.preparing)
        self._pool = ThreadPoolExecutor(factory.limits.threads, thread_name_prefix="prepare")

    async def prepare(self, raw: bytes, headers: Mapping[str, str], dialect: Dialect, caller: Caller) -> Call:
        """The call in `raw`. Raises RequestError: what dialect and factory refuse; at once `overloaded` when too many wait."""
        if not self._places.acquire(blocking=False):
            raise failure("overloaded", f"{self._factory.limits.preparing} requests are waiting to be read (limits.preparing)")
        future = self._pool.submit(self._work, raw, headers, dialect, caller)
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def _work(self, raw: bytes, headers: Mapping[str, str], dialect: Dialect, caller: Caller) -> Call:
        return self._factory.prepare(dialect.parse(raw, headers), caller)

    def _leave(self, _: Future[Call]) -> None:
        self._places.release()

    def close(self) -> None:
        """Let the threads end; calls still waiting are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
