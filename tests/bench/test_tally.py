from __future__ import annotations

import asyncio
import time
from typing import Any

from rackserve.bench.records import RequestRecord
from rackserve.bench.tally import Tally


def ended(**changes: Any) -> RequestRecord:
    return RequestRecord(
        "a/0/0/0", "a/0", 0, 0, 9, 10, 4, **({"prompt_tokens": 10, "cached_tokens": 5, "output_tokens": 4} | changes)
    )


def test_counts_follow_what_ended() -> None:
    tally = Tally()
    tally.sent = 4
    tally.close(ended(warmup=True))
    tally.close(ended())
    tally.close(ended(error="timeout", prompt_tokens=0, cached_tokens=0, output_tokens=0))
    assert (tally.in_flight, tally.finished, tally.failed, tally.warmups) == (1, 2, 1, 1)
    assert tally.line(2.0) == "1 in flight, 2 done (1 to warm up), 1 FAILED; 50% cached, 4 output tokens/s"


def test_without_a_moment_of_running_there_is_nothing_to_say() -> None:
    tally = Tally()
    assert tally.load() is None
    assert tally.line(0.0) == "0 in flight, 0 done; nothing cached yet, 0 output tokens/s"


def test_a_blocked_event_loop_is_seen() -> None:
    async def block() -> Tally:
        tally = Tally()
        watch = asyncio.create_task(tally.watch_lag())
        for wait_s in (0.0, 0.0, 0.08, 0.0):
            await asyncio.sleep(0.025)
            end = time.perf_counter() + wait_s
            while time.perf_counter() < end:  # nothing else runs meanwhile
                pass
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        return tally

    load = asyncio.run(block()).load()
    assert load is not None
    assert load.lag_max_ms > 50
    assert 0 < load.cpu_share < 1.5
