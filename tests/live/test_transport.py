from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq

from rackserve.base.messages import Cancel, RankUp
from rackserve.live import transport
from rackserve.live.host import LiveHost
from rackserve.live.transport import CONTROL, LiveTransport, Meeting, Wire
from tests.live.hostile import GREETING, ready
from tests.live.processes import Listener, new_meeting, until

WORKERS = ("prefill0", "decode0")


class Process:
    """One process of a rack, as far as its wire goes; all live in this test's process."""

    def __init__(self, meeting: Meeting, name: str, incarnation: int = 1, node: str | None = None) -> None:
        self.listener = Listener()
        loop = asyncio.get_running_loop()
        self.host = LiveHost(loop, pytest.fail)
        self.name, self.node = name, node or name
        self.host.add(self.node, self.listener)
        self.wire = Wire(loop, self.host, meeting, name, incarnation, WORKERS, self.listener.record_drop, self.see)
        self.peeked: list[object] = []

    def see(self, message: object) -> None:
        self.peeked.append((message, len(self.listener.messages)))

    def send(self, to: str, text: str) -> None:
        LiveTransport(self.wire, self.node).send(to, Cancel(text))


def pair(meeting: Meeting) -> tuple[Process, Process]:
    control, rank = Process(meeting, CONTROL, node="router"), Process(meeting, "prefill0")
    control.wire.peer_up("prefill0", 1)
    rank.wire.peer_up(CONTROL, 1)
    return control, rank


def trial(test: Callable[[Meeting, list[Process]], object]) -> None:
    async def run() -> None:
        processes: list[Process] = []
        try:
            await test(new_meeting(), processes)  # type: ignore[misc]
        finally:
            for process in processes:
                process.wire.close()

    asyncio.run(run())


def test_messages_keep_their_order_both_ways() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        texts = [str(number) for number in range(1000)]
        for text in texts:
            control.send("prefill0", text)
            rank.send("router", text)
        await until(lambda: len(control.listener.messages) == len(rank.listener.messages) == 1000)
        assert control.listener.texts == rank.listener.texts == texts
        assert not control.wire.dropped and not rank.wire.dropped

    trial(test)


def test_the_host_sees_a_message_just_before_its_node_does() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        control.send("prefill0", "a")
        await until(lambda: rank.listener.messages)
        assert rank.peeked == [(Cancel("a"), 0)]

    trial(test)


def test_an_overflow_is_a_counted_loss_and_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HIGH_WATER_MARK", 8)

    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control = Process(meeting, CONTROL, node="router")
        processes.append(control)
        control.wire.peer_up("prefill0", 1)  # nobody listens there
        for number in range(50):
            control.send("prefill0", str(number))
        assert control.wire.dropped["the outlet is full"] == 42
        assert control.listener.drops == [("prefill0", "Cancel", "the outlet is full")] * 42

    trial(test)


def test_a_stranger_without_the_secret_reaches_nobody() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        with zmq.Context() as context, context.socket(zmq.PUSH) as outlet:
            outlet.connect(meeting.address(CONTROL, 1))
            payload = msgspec.msgpack.encode(Cancel("x"))
            for secret in (b"", b"x" * 32, meeting.secret[:-1], meeting.secret + b"x"):
                outlet.send_multipart([secret, b"router", b"prefill0", b"1", payload])
            await until(lambda: control.wire.dropped["wrong secret"] == 4)
            rank.send("router", "known")
            await until(lambda: control.listener.messages)
        assert control.listener.texts == ["known"]
        assert control.listener.drops == []

    trial(test)


STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
peer.settimeout(5)
peer.connect("\\0" + sys.argv[1])
heard = b""
try:
    while part := peer.recv(1000):
        heard += part
except ConnectionError:
    pass
print(len(heard), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_another_user_who_knows_the_name_is_cut_off_unread() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        name = meeting.address(CONTROL, 1).removeprefix("ipc://@")
        nobody = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, name, stdout=PIPE)
        assert (await nobody.communicate())[0] == b"0\n"  # not even a greeting
        rank.send("router", "known")
        await until(lambda: control.listener.messages)
        assert control.listener.texts == ["known"] and not control.wire.dropped

    trial(test)


PICKLE = b"cposix\nsystem\n(S'touch %s'\ntR."


def test_bytes_that_are_no_message_are_dropped_counted_and_not_executed(tmp_path: Path) -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        canary, draw = tmp_path / "canary", Random(1)
        junk = [PICKLE % str(canary).encode(), pickle.dumps(Cancel), b"\xdf" + b"\xff" * 8, b"\xc6\xff\xff\xff\xff"]
        junk += [draw.randbytes(draw.randrange(200)) for _ in range(200)]
        with zmq.Context() as context, context.socket(zmq.PUSH) as outlet:
            outlet.connect(meeting.address(CONTROL, 1))
            for payload in junk:  # from one who knows no secret, then from one who does
                outlet.send_multipart([payload])
                outlet.send_multipart([meeting.secret, b"router", b"prefill0", b"1", payload])
            await until(lambda: sum(control.wire.dropped.values()) == 2 * len(junk))
            rank.send("router", "known")
            await until(lambda: control.listener.messages)
        assert control.wire.dropped["wrong secret"] == len(junk)
        assert control.listener.texts == ["known"] and not canary.exists()

    trial(test)


def test_a_length_beyond_the_limit_ends_the_connection() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        peer = socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        loop = asyncio.get_running_loop()
        with peer:
            await loop.sock_connect(peer, "\0" + meeting.address(CONTROL, 1).removeprefix("ipc://@"))
            await loop.sock_sendall(peer, GREETING + ready(b"PUSH") + b"\x02" + (1 << 62).to_bytes(8, "big"))
            with suppress(ConnectionError):
                while await asyncio.wait_for(loop.sock_recv(peer, 1000), 5):
                    pass
        rank.send("router", "known")
        await until(lambda: control.listener.messages)

    trial(test)


def test_an_address_cannot_be_guessed_without_the_secret() -> None:
    known = Meeting("run", b"a" * 32)
    assert known.address("prefill0", 2) == Meeting("run", b"a" * 32).address("prefill0", 2)
    assert known.address("prefill0", 2) != Meeting("run", b"b" * 32).address("prefill0", 2)
    assert known.address("prefill0", 2).startswith("ipc://@rackserve-run-prefill0-2-")


@pytest.mark.parametrize(
    ("to", "sender", "incarnation", "payload"),
    [
        (b"router", b"prefill0", b"1", b"\xc1garbage"),
        (b"router", b"prefill0", b"1", msgspec.msgpack.encode(["NoSuchMessage", 1])),
        (b"router", b"prefill0", b"1", msgspec.msgpack.encode(["Cancel", 7])),
        (b"router", b"prefill0", b"one", msgspec.msgpack.encode(Cancel("x"))),
        (b"\xff\xfe", b"prefill0", b"1", msgspec.msgpack.encode(Cancel("x"))),
        (b"#nothing", b"prefill0", b"1", b""),
        (b"#numbers", b"prefill0", b"1", b"\xc1"),
    ],
)
def test_what_cannot_be_decoded_is_dropped_and_the_next_message_arrives(
    to: bytes, sender: bytes, incarnation: bytes, payload: bytes
) -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        control.wire.listen("#numbers", lambda process, incarnation, payload: msgspec.msgpack.decode(payload, type=int))
        with zmq.Context() as context, context.socket(zmq.PUSH) as outlet:
            outlet.connect(meeting.address(CONTROL, 1))
            outlet.send_multipart([meeting.secret, to, sender, incarnation, payload])
            outlet.send_multipart([meeting.secret, b"too", b"short"])
            await until(lambda: sum(control.wire.dropped.values()) == 2)
        rank.send("router", "next")
        await until(lambda: control.listener.texts == ["next"])
        assert all(reason.startswith("undecodable") for _, _, reason in control.listener.drops)

    trial(test)


def test_a_bug_behind_a_channel_is_not_taken_for_a_damaged_payload() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        errors: list[BaseException] = []
        control.host._on_crash = errors.append
        control.wire.listen("#broken", lambda process, incarnation, payload: {}[process])
        rank.wire.send_raw(CONTROL, "#broken", b"")
        await until(lambda: errors)
        assert isinstance(errors[0], KeyError) and not control.wire.dropped

    trial(test)


def test_a_message_nobody_waits_for_is_counted() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        control.send("nobody", "a")
        control.send("decode0", "b")
        rank.send("nobody", "c")
        await until(lambda: len(control.listener.drops) == 3)
        assert control.listener.drops == [
            ("nobody", "Cancel", "unknown node"),
            ("decode0", "Cancel", "the process is not up"),
            ("nobody", "Cancel", "unknown node"),
        ]

    trial(test)


def test_nothing_of_a_dead_incarnation_is_delivered() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, first = pair(meeting)
        processes += [control, first]
        first.send("router", "alive")
        await until(lambda: control.listener.messages)
        control.wire.peer_down("prefill0", 1)
        first.send("router", "late 1")
        control.send("prefill0", "lost")
        await until(lambda: len(control.listener.drops) == 2)
        second = Process(meeting, "prefill0", 2)
        processes.append(second)
        second.wire.peer_up(CONTROL, 1)
        control.wire.peer_up("prefill0", 2)
        first.send("router", "late 2")
        await until(lambda: len(control.listener.drops) == 3)
        second.send("router", "reborn")
        control.send("prefill0", "to the new one")
        await until(lambda: second.listener.messages and len(control.listener.messages) == 2)
        assert control.listener.texts == ["alive", "reborn"]
        assert second.listener.texts == ["to the new one"]
        assert first.listener.messages == []

    trial(test)


def test_news_of_an_old_incarnation_changes_nothing_for_a_newer_one() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = Process(meeting, CONTROL, node="router"), Process(meeting, "prefill0", 2)
        processes += [control, rank]
        rank.wire.peer_up(CONTROL, 1)
        rank.send("router", "I am new")  # before anybody said so
        await until(lambda: control.listener.messages)
        control.wire.peer_down("prefill0", 1)
        control.wire.peer_up("prefill0", 1)
        control.send("prefill0", "I know")
        await until(lambda: rank.listener.messages)
        assert rank.listener.texts == ["I know"]

    trial(test)


def test_a_message_above_the_limit_is_lost_and_smaller_ones_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LARGEST_MESSAGE", 1000)

    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control, rank = pair(meeting)
        processes += [control, rank]
        control.send("prefill0", "x" * 2000)
        control.send("prefill0", "y")
        await until(lambda: rank.listener.messages)
        assert rank.listener.texts == ["y"]
        assert control.listener.drops == [("prefill0", "Cancel", "the message is too large")]

    trial(test)


def test_local_messages_need_no_socket_and_wait_for_the_running_handler() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        control = Process(meeting, CONTROL, node="router")
        processes.append(control)
        control.send("router", "a")
        assert control.listener.messages == []
        await until(lambda: control.listener.texts == ["a"])

    trial(test)


def test_messages_of_every_kind_survive_the_wire() -> None:
    async def test(meeting: Meeting, processes: list[Process]) -> None:
        from rackserve.base.ids import Rank

        control, rank = pair(meeting)
        processes += [control, rank]
        message = RankUp(Rank("decode0"), "decode", 3)
        control.wire.send("router", "prefill0", message)
        await until(lambda: rank.listener.messages)
        assert rank.listener.messages == [message]

    trial(test)
