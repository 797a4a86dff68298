from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rackserve.base.errors import ConfigError
from rackserve.model.deepseek_v41.engram.handshake import (
    ANSWER,
    CHALLENGE,
    MAGIC,
    answer_owner,
    challenge_link,
    read_secret,
    receive,
)

SECRET = b"s" * 32


def meet(owner: Callable[[socket.socket], object], link: Callable[[socket.socket], object]) -> tuple[object, object]:
    """What both sides of a connection come to think."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        ours.settimeout(5)
        theirs.settimeout(5)
        asked = pool.submit(owner, ours)
        found = link(theirs)
        theirs.close()
        return asked.result(5), found


def link_with(secret: bytes) -> Callable[[socket.socket], bool]:
    def link(peer: socket.socket) -> bool:
        magic, nonce = CHALLENGE.unpack(receive(peer, CHALLENGE.size))
        assert magic == MAGIC
        return answer_owner(peer, secret, nonce)

    return link


def test_both_sides_know_each_other_by_one_secret() -> None:
    assert meet(lambda peer: challenge_link(peer, SECRET), link_with(SECRET)) == (True, True)


def test_a_link_with_another_secret_is_told_nothing() -> None:
    def link(peer: socket.socket) -> bytes:
        receive(peer, CHALLENGE.size)
        peer.sendall(ANSWER.pack(bytes(32), bytes(32)))
        peer.settimeout(0.05)
        try:
            return peer.recv(1)
        except TimeoutError:
            return b""

    assert meet(lambda peer: challenge_link(peer, SECRET), link) == (False, b"")


def test_an_owner_that_only_pretends_is_found_out() -> None:
    def owner(peer: socket.socket) -> None:
        peer.sendall(CHALLENGE.pack(MAGIC, bytes(32)))
        _, proof = ANSWER.unpack(receive(peer, ANSWER.size))
        peer.sendall(proof)  # the link's own proof, sent back

    assert meet(owner, link_with(SECRET))[1] is False


def test_what_was_overheard_proves_nothing_later() -> None:
    heard: list[bytes] = []

    def listening(peer: socket.socket) -> bool:
        _, nonce = CHALLENGE.unpack(receive(peer, CHALLENGE.size))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(bytes(32))  # so that the answer can be seen on its way
            answer_owner(ours, SECRET, nonce)
            heard.append(receive(theirs, ANSWER.size))
        peer.sendall(heard[0])
        return len(receive(peer, 32)) == 32

    assert meet(lambda peer: challenge_link(peer, SECRET), listening) == (True, True)

    def replaying(peer: socket.socket) -> bool:
        receive(peer, CHALLENGE.size)
        peer.sendall(heard[0])
        return False

    assert meet(lambda peer: challenge_link(peer, SECRET), replaying)[0] is False


def test_a_secret_is_its_owners_alone_and_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "rows.secret"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(str(path))
    path.write_bytes(b"  " + SECRET + b"\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(str(path))
    path.chmod(0o600)
    assert read_secret(str(path)) == SECRET
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="at least 32 bytes, this one 5"):
        read_secret(str(path))
