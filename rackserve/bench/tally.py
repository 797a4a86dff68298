"""What a live run is doing at this moment, and whether the client keeps up with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rackserve.bench.metrics import percentile
from rackserve.bench.records import ClientLoad, RequestRecord

LAG_PERIOD_S = 0.02


class Tally:
    """Counts of one run over HTTP, kept by the client and read by whoever shows its progress."""

    __slots__ = (
        "_cpu_s",
        "_lags_ms",
        "_started_s",
        "cached_tokens",
        "failed",
        "finished",
        "output_tokens",
        "prompt_tokens",
        "sent",
        "warmups",
    )

    def __init__(self) -> None:
        self.sent = self.finished = self.failed = self.warmups = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self._lags_ms: list[float] = []
        self._started_s = self._cpu_s = 0.0

    @property
    def in_flight(self) -> int:
        return self.sent - self.finished - self.failed

    def close(self, record: RequestRecord) -> None:
        """A request ended."""
        if record.error:
            self.failed += 1
        else:
            self.finished += 1
        self.warmups += record.warmup
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.output_tokens += record.output_tokens

    def line(self, elapsed_s: float) -> str:
        """One line for a progress display."""
        share = f"{self.cached_tokens / self.prompt_tokens:.0%} cached" if self.prompt_tokens else "nothing cached yet"
        rate = self.output_tokens / elapsed_s if elapsed_s > 0 else 0.0
        warm = f" ({self.warmups} to warm up)" if self.warmups else ""
        failed = f", {self.failed} FAILED" if self.failed else ""
        late = f", client late by {self._lags_ms[-1]:.0f} ms" if self._lags_ms and self._lags_ms[-1] > 5 else ""
        return f"{self.in_flight} in flight, {self.finished} done{warm}{failed}; {share}, {rate:,.0f} output tokens/s{late}"

    async def watch_lag(self) -> None:
        """Measure until cancelled how late the event loop wakes up: so late may every chunk have been stamped."""
        loop = asyncio.get_running_loop()
        self._started_s, self._cpu_s = time.monotonic(), time.process_time()
        while True:
            wanted = loop.time() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lags_ms.append(max(0.0, (loop.time() - wanted) * 1_000))

    def load(self) -> ClientLoad | None:
        """How busy the client was; None if it was too short to say."""
        lags: Sequence[float] = sorted(self._lags_ms)
        if not lags:
            return None
        wall, cpu = time.monotonic() - self._started_s, time.process_time() - self._cpu_s
        return ClientLoad(percentile(lags, 0.5), percentile(lags, 0.99), lags[-1], cpu / wall if wall > 0 else 0.0)
