"""Junk, giants and pickles at every socket that messages come through: nothing is run or kept, and the next message arrives."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from rackserve.base.messages import Cancel
from rackserve.live.kv_events import NUMBER_BYTES, REPLAY_END, KvPublisher
from rackserve.live.transport import CONTROL, Meeting
from tests.live.hostile import GREETING, MIB, junk, num_descriptors, ready, resident_bytes, shout
from tests.live.processes import until
from tests.live.test_transport import Process, pair, trial

ROOM = 32 * MIB
"""Memory that a test may take besides; a stranger's length is far beyond it."""


def test_junk_at_the_inlet_of_a_process_changes_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        rank.send("router", "before")
        await until(lambda: control.listener.messages)
        memory, descriptors = resident_bytes(), num_descriptors()
        path = "\0" + meeting.address(CONTROL, 1).removeprefix("ipc://@")
        await asyncio.gather(*[shout(*await asyncio.open_unix_connection(path), data) for data in junk(canary)])
        rank.send("router", "after")
        await until(lambda: control.listener.texts == ["before", "after"])
        await until(lambda: num_descriptors() == descriptors)
        assert resident_bytes() - memory < ROOM
        assert set(control.wire.dropped) <= {"wrong secret"}

    trial(test)
    assert not canary.exists()


def test_only_who_knows_the_secret_can_send_a_message_again() -> None:
    """That is a process of this user; what comes twice is for the nodes to drop."""

    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        frames = [meeting.secret, b"router", b"prefill0", b"1", msgspec.msgpack.encode(Cancel("again"))]
        with zmq.Context() as context, context.socket(zmq.PUSH) as outlet:
            outlet.connect(meeting.address(CONTROL, 1))
            for secret in (meeting.secret, meeting.secret, b"\0" * 32):
                outlet.send_multipart([secret, *frames[1:]])
            await until(lambda: len(control.listener.messages) == 2 and control.wire.dropped["wrong secret"] == 1)

    trial(test)


async def heard(publisher: KvPublisher, context: zmq.asyncio.Context) -> None:
    """A subscriber hears what is published, and who asks gets it again."""
    subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.subscribe(b"")
    subscriber.connect(publisher.endpoint)
    dealer.connect(publisher.replay_endpoint)
    for _ in range(200):
        publisher.publish(b"payload")
        if await subscriber.poll(10):
            break
    assert (await subscriber.recv_multipart())[2] == b"payload"
    await dealer.send_multipart((b"", (publisher.number - 1).to_bytes(NUMBER_BYTES, "big")))
    assert (await dealer.recv_multipart())[2] == b"payload"
    assert await dealer.recv_multipart() == [b"", REPLAY_END, b""]
    subscriber.close(0)
    dealer.close(0)


def on_publisher(test: object) -> None:
    async def run() -> None:
        publisher, context = KvPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"), zmq.asyncio.Context()
        try:
            await asyncio.wait_for(test(publisher, context), 30)  # type: ignore[operator]
        finally:
            context.destroy(linger=0)
            publisher.close()

    asyncio.run(run())


@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
def test_junk_at_the_sockets_for_kv_events_changes_nothing(which: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    async def test(publisher: KvPublisher, context: zmq.asyncio.Context) -> None:
        await heard(publisher, context)
        memory = resident_bytes()
        host, port = getattr(publisher, which).removeprefix("tcp://").split(":")
        await asyncio.gather(*[shout(*await asyncio.open_connection(host, int(port)), data) for data in junk(canary)])
        assert resident_bytes() - memory < ROOM
        await heard(publisher, context)

    on_publisher(test)
    assert not canary.exists()


@pytest.mark.parametrize(("which", "kind"), [("endpoint", b"SUB"), ("replay_endpoint", b"DEALER")])
def test_giant_subscriptions_and_requests_end_the_connection(which: str, kind: bytes) -> None:
    async def test(publisher: KvPublisher, context: zmq.asyncio.Context) -> None:
        memory = resident_bytes()
        host, port = getattr(publisher, which).removeprefix("tcp://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(GREETING + ready(kind))
        await reader.readexactly(len(GREETING))
        body = b"\x01" + b"x" * (8 * MIB)
        with suppress(ConnectionError):  # it may close while we still write
            writer.write(b"\x02" + len(body).to_bytes(8, "big") + body)
            await writer.drain()
            while await asyncio.wait_for(reader.read(1 << 16), 10):
                pass
        writer.close()
        assert resident_bytes() - memory < ROOM
        await heard(publisher, context)

    on_publisher(test)


def test_many_requests_for_a_replay_do_not_hold_up_the_loop() -> None:
    """Between a few of them everything else has its turn: counted, as time would depend on the machine."""

    async def test(publisher: KvPublisher, context: zmq.asyncio.Context) -> None:
        dealer, turns = context.socket(zmq.DEALER), 0
        dealer.connect(publisher.replay_endpoint)
        for _ in range(40):
            await dealer.send_multipart((b"", b"\xff" * NUMBER_BYTES))
        replay = publisher._replay
        assert replay is not None
        most, answered = 0, 0
        original = replay.send_multipart

        def counting(*arguments: object) -> object:
            nonlocal answered
            answered += 1
            return original(*arguments)  # type: ignore[arg-type]

        object.__setattr__(replay, "send_multipart", counting)
        while answered < 40:
            before = answered
            await asyncio.sleep(0)
            most, turns = max(most, answered - before), turns + 1
        assert most <= 8 and turns >= 5

    on_publisher(test)
