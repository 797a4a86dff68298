from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import numpy as np
import pytest

from rackserve.base.errors import ConfigError, ResourceError
from rackserve.model.deepseek_v41.engram.links import MappedLink, owned_rows
from rackserve.model.deepseek_v41.engram.sockets import (
    HELLO,
    MAGIC,
    OWNED,
    REPLY,
    REQUEST,
    ShardServer,
    SocketLink,
    parse_address,
)
from tests.model.deepseek_v41.engram.tiny import LAYERS, NUM_ROWS, made_up, stored

WIDTH = 33
LIMIT_S = 0.2
SOON_S = 5.0
"""No error takes as long as this, however busy the machine."""

SERVE = """
import sys
from pathlib import Path
from rackserve.model.deepseek_v41.engram.links import MappedLink
from rackserve.model.deepseek_v41.engram.sockets import ShardServer
from tests.model.deepseek_v41.engram.tiny import made_up
server = ShardServer(sys.argv[1], MappedLink(made_up(Path(sys.argv[2]))))
print("serving", flush=True)
sys.stdin.read()
"""

Talk = Callable[[socket.socket], None]


def owned(num_shards: int = 1, shard: int = 0) -> dict[int, range]:
    return owned_rows(dict.fromkeys(LAYERS, NUM_ROWS), num_shards, shard)


def say_hello(peer: socket.socket) -> None:
    tables = b"".join(OWNED.pack(layer, rows.start, rows.stop) for layer, rows in owned().items())
    peer.sendall(HELLO.pack(MAGIC, WIDTH, len(LAYERS)) + tables)


def read_all(peer: socket.socket, size: int) -> bytes:
    return peer.recv(size, socket.MSG_WAITALL)


@pytest.fixture
def pretend() -> Iterator[Callable[[Talk], str]]:
    """Starts an owner that behaves as the test says with its only link; its address. It waits for the link's end itself."""
    with ExitStack() as stack:

        def start(talk: Talk) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                peer, _ = listener.accept()
                with peer, suppress(OSError):
                    talk(peer)

            thread = Thread(target=serve, daemon=True)
            thread.start()
            stack.callback(thread.join, SOON_S)
            return "tcp://{}:{}".format(*listener.getsockname())

        yield start


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    with ShardServer("tcp://127.0.0.1:0", MappedLink(made_up(tmp_path))) as server:
        yield server


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 18])
def test_rows_over_sockets_are_those_of_the_unsplit_table(tmp_path: Path, num_shards: int) -> None:
    tables = made_up(tmp_path)
    with ExitStack() as stack:
        for shard in range(num_shards):
            address = f"ipc://{tmp_path}/rows" if shard == 0 else f"ipc://@rackserve-test-{os.getpid()}-{num_shards}-{shard}"
            stack.enter_context(ShardServer(address, MappedLink(tables, num_shards, shard)))
            link = SocketLink(address, owned(num_shards, shard), WIDTH)
            stack.callback(link.close)
            for layer in LAYERS:
                own = np.array(owned(num_shards, shard)[layer])
                for ids in (own, own[:1], own[-7:], own[:0], np.concatenate((own[3:9], own[5:1:-1], own[5:6]))):
                    assert np.array_equal(link.fetch(layer, ids)(), stored(layer)[ids])


def test_answers_may_be_taken_in_any_order(server: ShardServer) -> None:
    link = SocketLink(server.address, owned(), WIDTH)
    asked = [(row, link.fetch(LAYERS[row % 2], np.array([row]))) for row in range(50)]
    for row, take in reversed(asked):
        assert np.array_equal(take()[0], stored(LAYERS[row % 2])[row])
    link.close()


def test_large_requests_may_be_sent_before_any_answer_is_taken(server: ShardServer) -> None:
    link = SocketLink(server.address, owned(), WIDTH)
    ids = np.arange(300_000) % NUM_ROWS
    asked = [link.fetch(1, ids) for _ in range(4)]
    assert all(np.array_equal(take(), stored(1)[ids]) for take in asked)
    link.close()


STRANGER = """
import os, socket, sys
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
peer.settimeout(5)
peer.connect("\\0" + sys.argv[1])
print(len(peer.recv(1)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_another_user_of_the_machine_is_not_served(tmp_path: Path) -> None:
    name = f"rackserve-test-{os.getpid()}-mine"
    with ShardServer(f"ipc://@{name}", MappedLink(made_up(tmp_path))) as server:
        words = [sys.executable, "-c", STRANGER, name]
        assert subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=20).stdout == b"0\n"
        link = SocketLink(server.address, owned(), WIDTH)
        assert np.array_equal(link.fetch(1, np.array([5]))(), stored(1)[[5]])
        link.close()


def test_several_links_share_an_owner(server: ShardServer) -> None:
    links = [SocketLink(server.address, owned(), WIDTH) for _ in range(3)]
    asked = [link.fetch(3, np.array([number, 500])) for number, link in enumerate(links)]
    for number, take in enumerate(asked):
        assert np.array_equal(take(), stored(3)[[number, 500]])
    for link in links:
        link.close()


def test_no_rows_never_reach_the_owner() -> None:
    link = SocketLink("ipc://@nobody-listens-here", owned(), WIDTH)
    assert link.fetch(1, np.empty(0, np.int64))().shape == (0, WIDTH)
    link.close()


def test_a_killed_owner_fails_requests_soon_and_a_new_one_is_found(tmp_path: Path) -> None:
    address = f"ipc://@rackserve-test-{os.getpid()}-killed"
    words = [sys.executable, "-c", SERVE, address, str(tmp_path)]

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[4])
        assert process.stdout is not None and process.stdout.readline() == b"serving\n"
        return process

    link, ids = SocketLink(address, owned(), WIDTH), np.array([5, 1008])
    with start() as process:
        assert np.array_equal(link.fetch(3, ids)(), stored(3)[ids])
        process.kill()
        process.wait()
        for _ in range(2):
            begun = monotonic()
            with pytest.raises(ResourceError, match=r"killed is gone .*start it again"):
                link.fetch(3, ids)()
            assert monotonic() - begun < SOON_S
    with start() as process:
        assert np.array_equal(link.fetch(3, ids)(), stored(3)[ids])
        process.kill()
    link.close()


def expect_late(address: str, ids: np.ndarray) -> None:
    link, begun = SocketLink(address, owned(), WIDTH, LIMIT_S), monotonic()
    with pytest.raises(ResourceError, match=r"did not answer within 0\.2 s"):
        link.fetch(1, ids)()
    assert LIMIT_S * 0.9 < monotonic() - begun < SOON_S
    link.close()


def test_an_owner_that_never_answers_is_an_error_within_the_limit(pretend: Callable[[Talk], str]) -> None:
    def silent(peer: socket.socket) -> None:
        say_hello(peer)
        while peer.recv(4096):
            pass

    expect_late(pretend(silent), np.arange(7))


def test_an_owner_that_never_speaks_is_an_error_within_the_limit(pretend: Callable[[Talk], str]) -> None:
    def mute(peer: socket.socket) -> None:
        peer.recv(1)

    expect_late(pretend(mute), np.arange(7))


def test_an_owner_that_never_reads_is_an_error_within_the_limit(pretend: Callable[[Talk], str]) -> None:
    over = Event()

    def deaf(peer: socket.socket) -> None:
        say_hello(peer)
        over.wait(SOON_S)

    expect_late(pretend(deaf), np.arange(4_000_000) % NUM_ROWS)
    over.set()


def test_an_answer_after_the_limit_is_nobodys(pretend: Callable[[Talk], str]) -> None:
    def late(peer: socket.socket) -> None:
        say_hello(peer)
        asked = [REQUEST.unpack(read_all(peer, REQUEST.size + 8)[: REQUEST.size]) for _ in range(2)]
        for number, _, _ in asked:
            peer.sendall(REPLY.pack(number, False, WIDTH) + bytes([number]) * WIDTH)
        peer.recv(1)

    link = SocketLink(pretend(late), owned(), WIDTH, LIMIT_S)
    with pytest.raises(ResourceError, match="did not answer"):
        link.fetch(1, np.array([8]))()
    assert (link.fetch(1, np.array([9]))() == 1).all()
    link.close()


@pytest.mark.parametrize("size", [0, WIDTH - 1, 1 << 60])
def test_an_answer_of_another_size_is_an_error(pretend: Callable[[Talk], str], size: int) -> None:
    def wrong(peer: socket.socket) -> None:
        say_hello(peer)
        number, _, _ = REQUEST.unpack(read_all(peer, REQUEST.size + 8)[: REQUEST.size])
        peer.sendall(REPLY.pack(number, False, size) + bytes(min(size, WIDTH)))
        peer.recv(1)

    link = SocketLink(pretend(wrong), owned(), WIDTH)
    with pytest.raises(ResourceError, match=f"{size} bytes"):
        link.fetch(1, np.array([8]))()
    link.close()


def test_an_owner_of_other_rows_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    with ShardServer("tcp://127.0.0.1:0", MappedLink(made_up(tmp_path), 2, 1)) as server:
        for wrong in (owned(2, 0), {1: owned(2, 1)[1]}):
            link = SocketLink(server.address, wrong, WIDTH)
            with pytest.raises(ConfigError, match="does not own the rows"):
                link.fetch(1, np.array([8]))
            link.close()


def test_an_owner_says_why_it_refuses_and_goes_on(server: ShardServer) -> None:
    link = SocketLink(server.address, owned(), WIDTH)
    with pytest.raises(ResourceError, match="not all of them its own"):
        link.fetch(1, np.array([NUM_ROWS]))()
    assert np.array_equal(link.fetch(1, np.array([3]))(), stored(1)[[3]])
    link.close()


def test_closing_a_link_fails_what_waits_at_once(pretend: Callable[[Talk], str]) -> None:
    def silent(peer: socket.socket) -> None:
        say_hello(peer)
        while peer.recv(4096):
            pass

    link, begun = SocketLink(pretend(silent), owned(), WIDTH, 60), monotonic()
    take = link.fetch(1, np.array([8]))
    link.close()
    with pytest.raises(ResourceError, match="is gone"):
        take()
    assert monotonic() - begun < SOON_S


def test_an_address_in_use_is_refused(server: ShardServer, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot serve rows at tcp://127"):
        ShardServer(server.address, MappedLink(made_up(tmp_path)))


@pytest.mark.parametrize(
    "address", ["", "rows", "ipc://", "tcp://:1", "tcp://here", "tcp://here:x", "tcp://here:65536", "udp://a:1"]
)
def test_an_address_of_no_known_form_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be ipc://@name"):
        parse_address(address)


def secret_file(folder: Path, name: str, letter: bytes) -> Path:
    path = folder / name
    path.write_bytes(letter * 32)
    path.chmod(0o600)
    return path


def test_with_a_secret_only_those_who_know_it_get_rows(tmp_path: Path) -> None:
    right, wrong = secret_file(tmp_path, "right", b"r"), secret_file(tmp_path, "wrong", b"w")
    with ShardServer(f"tcp://127.0.0.1:0#{right}", MappedLink(made_up(tmp_path))) as server:
        link = SocketLink(f"{server.address}#{right}", owned(), WIDTH)
        assert np.array_equal(link.fetch(1, np.array([5]))(), stored(1)[[5]])
        for behind, told in ((f"#{wrong}", "does not know this secret"), ("", "asks for a secret")):
            stranger = SocketLink(server.address + behind, owned(), WIDTH)
            with pytest.raises(ConfigError, match=told):
                stranger.fetch(1, np.array([5]))
        assert np.array_equal(link.fetch(1, np.array([6]))(), stored(1)[[6]])
        link.close()
    assert server.num_refused == 2


def test_an_owner_without_the_secret_is_not_believed(server: ShardServer, tmp_path: Path) -> None:
    link = SocketLink(f"{server.address}#{secret_file(tmp_path, 'right', b'r')}", owned(), WIDTH)
    with pytest.raises(ConfigError, match="does not ask for the secret"):
        link.fetch(1, np.array([5]))


def test_beyond_this_machine_rows_are_not_served_without_a_secret(tmp_path: Path) -> None:
    link = MappedLink(made_up(tmp_path))
    for address in ("tcp://0.0.0.0:0", "tcp://:0".replace("//", "//0.0.0.0"), "tcp://8.8.8.8:0"):
        with pytest.raises(ConfigError, match="from other machines by anyone"):
            ShardServer(address, link)
    with ShardServer(f"tcp://0.0.0.0:0#{secret_file(tmp_path, 'right', b'r')}", link):
        pass


def test_who_knows_nothing_gets_nothing_and_costs_nothing(tmp_path: Path) -> None:
    """Junk, silence and lengths beyond all bounds, before and after the greeting: the owner closes and goes on serving."""
    right = secret_file(tmp_path, "right", b"r")
    junk = [b"", b"\0" * 64, os.urandom(4096), REQUEST.pack(1, 1, 2**32 - 1) * 8, b"cposix\nsystem\n(S'touch x'\ntR." * 4]
    for secret in (f"#{right}", ""):
        with ShardServer(f"tcp://127.0.0.1:0{secret}", MappedLink(made_up(tmp_path))) as server:
            where = parse_address(server.address)[1]
            for part in junk:
                with socket.socket() as peer, suppress(OSError):  # it may be closed while we still speak
                    peer.settimeout(SOON_S)
                    peer.connect(where)
                    peer.sendall(part)
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(1 << 16):
                        pass
            link = SocketLink(server.address + secret, owned(), WIDTH)
            assert np.array_equal(link.fetch(1, np.array([5]))(), stored(1)[[5]])
            link.close()
        assert server.num_refused >= (len(junk) if secret else 1)
