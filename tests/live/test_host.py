from __future__ import annotations

import asyncio
import time

import pytest

from rackserve.base.errors import InvariantError
from rackserve.base.messages import Cancel, Message
from rackserve.live import host as host_module
from rackserve.live.host import LiveHost
from tests.live.processes import Listener, until


def run(test) -> None:
    asyncio.run(test)


def test_messages_are_handled_in_order_and_a_handler_is_never_entered_twice() -> None:
    async def trial() -> None:
        host = LiveHost(asyncio.get_running_loop(), pytest.fail)
        seen: list[str] = []
        depth = 0

        class Node:
            def handle(self, message: Message) -> None:
                nonlocal depth
                depth += 1
                assert depth == 1
                assert isinstance(message, Cancel)
                seen.append(message.request)
                if message.request == "a":
                    host.post("other", Cancel("c"))
                    host.deliver()
                depth -= 1

        host.add("node", Node())
        host.add("other", Node())
        host.post("node", Cancel("a"))
        host.post("node", Cancel("b"))
        assert seen == []
        await until(lambda: len(seen) == 3)
        assert seen == ["a", "b", "c"]

    run(trial())


def test_a_full_inbox_refuses_messages_but_not_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trial() -> None:
        monkeypatch.setattr(host_module, "INBOX_LIMIT", 2)
        host, node = LiveHost(asyncio.get_running_loop(), pytest.fail), Listener()
        host.add("node", node)
        assert [host.post("node", Cancel(text)) for text in "abc"] == [True, True, False]
        assert host.post("node", Cancel("end"), bounded=False)
        await until(lambda: len(node.messages) == 3)
        assert node.texts == ["a", "b", "end"]

    run(trial())


def test_more_than_a_burst_is_delivered_while_the_loop_serves_others() -> None:
    async def trial() -> None:
        host, node = LiveHost(asyncio.get_running_loop(), pytest.fail), Listener()
        host.add("node", node)
        for number in range(3 * host_module.BURST):
            host.post("node", Cancel(str(number)))
        await asyncio.sleep(0)
        assert len(node.messages) == host_module.BURST
        await until(lambda: len(node.messages) == 3 * host_module.BURST)

    run(trial())


def test_timers_ring_in_order_and_never_early() -> None:
    async def trial() -> None:
        host = LiveHost(asyncio.get_running_loop(), pytest.fail)
        rings: list[tuple[str, int]] = []

        class Node:
            def handle(self, message: Message) -> None:
                assert isinstance(message, Cancel)
                rings.append((message.request, time.monotonic_ns()))

        host.add("node", Node())
        start = time.monotonic_ns()
        for delay in (9_000_000, 3_000_000, 6_000_001, 0):
            host.call_at(start + delay, "node", Cancel(str(delay)))
        await until(lambda: len(rings) == 4)
        assert [int(text) for text, _ in rings] == [0, 3_000_000, 6_000_001, 9_000_000]
        assert all(at >= start + int(text) for text, at in rings)

    run(trial())


def test_too_many_timers_are_an_error_and_rung_ones_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trial() -> None:
        monkeypatch.setattr(host_module, "TIMER_LIMIT", 1)
        host, node = LiveHost(asyncio.get_running_loop(), pytest.fail), Listener()
        host.add("node", node)
        host.call_at(0, "node", Cancel("a"))
        with pytest.raises(InvariantError, match="node"):
            host.call_at(0, "node", Cancel("b"))
        await until(lambda: node.texts == ["a"])
        host.call_at(0, "node", Cancel("c"))
        await until(lambda: node.texts == ["a", "c"])

    run(trial())


def test_an_error_in_a_handler_stops_all_delivery_and_is_told_once() -> None:
    async def trial() -> None:
        crashes: list[BaseException] = []
        host, other = LiveHost(asyncio.get_running_loop(), crashes.append), Listener()

        class Node:
            def handle(self, message: Message) -> None:
                raise ValueError("broken")

        host.add("node", Node())
        host.add("other", other)
        for name in ("node", "node", "other"):
            host.post(name, Cancel("x"))
        await until(lambda: crashes)
        host.post("other", Cancel("y"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [str(error) for error in crashes] == ["broken"]
        assert other.messages == []

    run(trial())


def test_a_node_id_is_taken_once() -> None:
    async def trial() -> None:
        host = LiveHost(asyncio.get_running_loop(), pytest.fail)
        host.add("node", Listener())
        with pytest.raises(InvariantError, match="node exists"):
            host.add("node", Listener())
        assert not host.post("nobody", Cancel("x"))

    run(trial())
