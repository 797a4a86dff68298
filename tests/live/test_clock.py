from __future__ import annotations

import asyncio
import time

import pytest

from rackserve.base.messages import Timeout
from rackserve.live.clock import LiveClock
from rackserve.live.host import LiveHost
from tests.live.processes import Listener, until


def test_a_timer_comes_back_to_the_node_that_asked() -> None:
    async def trial() -> None:
        host = LiveHost(asyncio.get_running_loop(), pytest.fail)
        asking, other = Listener(), Listener()
        host.add("asking", asking)
        host.add("other", other)
        clock = LiveClock(host, "asking")
        before = time.monotonic_ns()
        now = clock.now()
        assert before <= now <= time.monotonic_ns()
        clock.call_at(now, Timeout("lookup", "r"))
        await until(lambda: asking.messages)
        assert asking.messages == [Timeout("lookup", "r")]
        assert other.messages == []

    asyncio.run(trial())
