"""Rows of a shard over a socket: its owner serves them, links of other processes or machines ask for them.

Addresses are `ipc://@name` (Linux's abstract sockets, gone with their process), `ipc:///path` and `tcp://host:port`, each with
`#FILE` if a secret in that file is asked for (see `handshake`). Numbers are little-endian. The owner begins with HELLO and an
OWNED per table; then requests, each a REQUEST and its row ids (int64), are answered in order by a REPLY and its bytes: rows, or
the text of an error. Of Unix sockets only processes of the owner's user are served. Beyond this machine a secret is a must.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Event, Lock, Thread
from time import monotonic
from types import TracebackType
from typing import Any, Self

import numpy as np

from rackserve.base.errors import ConfigError, RackserveError, ResourceError
from rackserve.model.deepseek_v41.engram import handshake
from rackserve.model.deepseek_v41.engram.links import MappedLink
from rackserve.model.deepseek_v41.engram.tables import RowIds, Rows

LIMIT_S = 10.0
"""How long an owner may take to answer a request."""

MAX_ROWS = 1 << 22
"""Rows of one request; a frame that claims more is not from a link."""

MAGIC = b"rs-rows1"
HELLO = struct.Struct("<8sII")
"""Magic, bytes of a row, number of tables."""
OWNED = struct.Struct("<Iqq")
"""Layer, first row owned, row after the last."""
HANDSHAKE_S = 5.0
"""How long a stranger may take to prove what it knows."""

MAX_CONNECTIONS = 256
"""Links of one owner, strangers among them; more are closed at once."""

ACCEPT_PAUSE_S = 0.05
"""Before an owner that could not take a connection tries again."""

CREDENTIALS = struct.Struct("=iII")
"""Process, user and group at the other end of a Unix socket."""
REQUEST = struct.Struct("<QII")
"""Number of the request, layer, number of rows."""
REPLY = struct.Struct("<Q?Q")
"""Number of the request, whether it failed, bytes that follow."""


def parse_address(address: str) -> tuple[int, str | tuple[str, int], str]:
    """(socket family, what to bind or connect, file of the secret). ConfigError unless `address` has one of the three forms."""
    place, _, secret = address.partition("#")
    kind, _, rest = place.partition("://")
    host, _, port = rest.rpartition(":")
    if kind == "ipc" and rest:
        return socket.AF_UNIX, "\0" + rest[1:] if rest.startswith("@") else rest, secret
    if kind == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return socket.AF_INET, (host, int(port)), secret
    raise ConfigError(
        f"address {address!r} of a row shard must be ipc://@name, ipc:///path or tcp://host:port, then #FILE for a secret"
    )


class ShardServer:
    """Serves the rows of `link` at `address` from threads of this process until `close`.

    Port 0 takes a free one: `address` then tells which. ResourceError if it cannot listen there, ConfigError if it would be
    reached from other machines without a secret. `num_refused` counts connections that were closed without a row.
    """

    __slots__ = ("_acceptor", "_closing", "_connections", "_link", "_listener", "_secret", "_threads", "address", "num_refused")

    def __init__(self, address: str, link: MappedLink) -> None:
        family, where, secret = parse_address(address)
        self._secret = handshake.read_secret(secret) if secret else b""
        if not self._secret and not isinstance(where, str) and not _is_loopback(where[0]):
            raise ConfigError(
                f"rows at {address} could be had from other machines by anyone: put the file of a secret behind the address, "
                f"{address}#FILE, here and in runner.engram_owners, or listen on loopback"
            )
        self.num_refused = 0
        self._link, self._connections, self._threads = link, set[socket.socket](), list[Thread]()
        self._closing = Event()
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET:
                self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(where)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise ResourceError(f"cannot serve rows at {address} ({error}); choose another address") from error
        self.address = "tcp://{}:{}".format(*self._listener.getsockname()) if family == socket.AF_INET else address
        self._acceptor = self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, break all connections, wait for the threads."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        for each in tuple(self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, target: Callable[[], None]) -> Thread:
        thread = Thread(target=target, name=f"rows {self.address}", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                if self._closing.wait(ACCEPT_PAUSE_S):
                    return
                continue  # short of descriptors, for example: connections will end
            if not _may_connect(peer) or len(self._connections) >= MAX_CONNECTIONS:
                self.num_refused += 1
                peer.close()
                continue
            self._connections.add(peer)
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(self._start(partial(self._serve, peer)))

    def _serve(self, peer: socket.socket) -> None:
        """Answer a link's requests, one after the other, until it goes."""
        owned = self._link.owned
        with peer, suppress(OSError, EOFError):
            _without_delay(peer)
            if not self._is_known(peer):
                self.num_refused += 1
                self._connections.discard(peer)
                return
            tables = b"".join(OWNED.pack(layer, rows.start, rows.stop) for layer, rows in owned.items())
            peer.sendall(HELLO.pack(MAGIC, self._link.row_bytes, len(owned)) + tables)
            while True:
                number, layer, num_rows = _receive_frame(peer, REQUEST)
                if num_rows > MAX_ROWS:
                    self.num_refused += 1
                    break
                rows = _receive(peer, num_rows * 8).view("<i8")
                try:
                    failed, data = False, self._link.fetch(layer, rows)().tobytes()
                except RackserveError as error:
                    failed, data = True, str(error).encode()
                peer.sendall(REPLY.pack(number, failed, len(data)))
                peer.sendall(data)
        self._connections.discard(peer)

    def _is_known(self, peer: socket.socket) -> bool:
        """Whether a connection proves in time that it knows the secret, if there is one."""
        if not self._secret:
            return True
        peer.settimeout(HANDSHAKE_S)
        try:
            known = handshake.challenge_link(peer, self._secret)
        except (OSError, EOFError):
            return False
        peer.settimeout(None)
        return known


class SocketLink:
    """The way to a shard that a `ShardServer` at `address` owns: rows `owned` by layer, of `row_bytes` bytes.

    Connects when rows are first asked for, and again after a connection broke. An owner that is gone, or silent for `limit_s`
    seconds of a request, makes that request fail with ResourceError; an answer that comes later is dropped. ConfigError if the
    owner holds other rows than `owned`.
    """

    __slots__ = ("_address", "_connection", "_limit_s", "_lock", "_numbers", "_owned", "_row_bytes")
    is_near = False

    def __init__(self, address: str, owned: Mapping[int, range], row_bytes: int, limit_s: float = LIMIT_S) -> None:
        parse_address(address)
        self._address, self._owned, self._row_bytes, self._limit_s = address, dict(owned), row_bytes, limit_s
        self._connection: _Connection | None = None
        self._lock, self._numbers = Lock(), count()

    def fetch(self, layer: int, rows: RowIds) -> Callable[[], Rows]:
        """See `RowLink`. No rows at all are there at once, whether the owner lives or not."""
        if not len(rows):
            none: Rows = np.empty((0, self._row_bytes), np.uint8)
            return lambda: none
        if len(rows) > MAX_ROWS:
            raise ResourceError(f"{len(rows)} rows asked of {self._address} at once, {MAX_ROWS} are served; use smaller steps")
        until = monotonic() + self._limit_s
        if not self._lock.acquire(timeout=self._limit_s):
            raise self._late()
        try:
            if self._connection is None or self._connection.broken:
                self._connection = _Connection(self._address, self._owned, self._row_bytes, until)
            number = next(self._numbers)
            reply = self._connection.ask(number, layer, rows, until)
            return partial(self._take, self._connection, number, reply, len(rows), until)
        except TimeoutError as error:
            raise self._late() from error
        except (OSError, EOFError) as error:
            raise ResourceError(f"the owner of Engram rows at {self._address} is gone ({error}); start it again") from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """Break the connection: what is still waited for fails at once."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    def _take(self, connection: _Connection, number: int, reply: Future[Rows], num_rows: int, until: float) -> Rows:
        try:
            data = reply.result(_left(until))
        except TimeoutError as error:
            connection.forget(number)
            raise self._late() from error
        if data.size != num_rows * self._row_bytes:
            raise ResourceError(f"the owner at {self._address} sent {data.size} bytes for {num_rows} rows; start it again")
        return data.reshape(num_rows, self._row_bytes)

    def _late(self) -> ResourceError:
        return ResourceError(
            f"the owner of Engram rows at {self._address} did not answer within {self._limit_s:g} s; see that it runs"
        )


class _Connection:
    """A connection, the requests that wait for a reply, and the thread that reads replies, so that no owner waits to send."""

    __slots__ = ("_address", "_row_bytes", "_socket", "_waiting", "broken")

    def __init__(self, address: str, owned: Mapping[int, range], row_bytes: int, until: float) -> None:
        family, where, secret_file = parse_address(address)
        secret = handshake.read_secret(secret_file) if secret_file else b""
        self._address, self._row_bytes, self.broken = address, row_bytes, False
        self._waiting: dict[int, Future[Rows]] = {}
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            _without_delay(self._socket)
            self._socket.settimeout(_left(until))
            self._socket.connect(where)
            magic, found_bytes, num_tables = self._hello(secret)
            if magic == MAGIC and num_tables == len(owned):
                tables = OWNED.iter_unpack(_receive(self._socket, num_tables * OWNED.size).tobytes())
                found = {layer: range(start, stop) for layer, start, stop in tables}
            if magic != MAGIC or num_tables != len(owned) or (found, found_bytes) != (dict(owned), row_bytes):
                raise ConfigError(
                    f"{address} does not own the rows asked of it ({dict(owned)}); list its shards in their order"
                )
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise
        Thread(target=self._read, name=f"rows of {address}", daemon=True).start()

    def _hello(self, secret: bytes) -> tuple[Any, ...]:
        """The owner's HELLO, once each side has shown that it knows the secret. ConfigError if one does not, or wants none."""
        head = _receive(self._socket, HELLO.size).tobytes()
        if head.startswith(handshake.MAGIC) != bool(secret):
            told = "does not ask for the secret" if secret else "asks for a secret: name its file behind the address, #FILE"
            raise ConfigError(f"{self._address} {told}")
        if secret:
            nonce = head[len(handshake.MAGIC) :] + handshake.receive(self._socket, handshake.CHALLENGE.size - HELLO.size)
            try:
                known = handshake.answer_owner(self._socket, secret, nonce)
            except (ConnectionError, EOFError):
                known = False
            if not known:
                raise ConfigError(f"the owner of Engram rows at {self._address} does not know this secret; give both one file")
            head = _receive(self._socket, HELLO.size).tobytes()
        return HELLO.unpack(head)

    def ask(self, number: int, layer: int, rows: RowIds, until: float) -> Future[Rows]:
        """Send a request; TimeoutError or OSError breaks the connection, since part of it may be on its way."""
        reply: Future[Rows] = Future()
        self._waiting[number] = reply
        frame = memoryview(REQUEST.pack(number, layer, len(rows)) + rows.astype("<i8", copy=False).tobytes())
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        try:
            while frame:
                if not poll.poll(_left(until) * 1000) or monotonic() > until:
                    raise TimeoutError
                # Not blocking, though the reading thread's calls on this socket do.
                with suppress(BlockingIOError):
                    frame = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
        except OSError:
            self.close()
            raise
        if self.broken:  # perhaps before the request was on the list of those to fail
            self._fail("closed")
        return reply

    def forget(self, number: int) -> None:
        """Nobody waits for this request's reply any more."""
        self._waiting.pop(number, None)

    def close(self) -> None:
        self.broken = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                number, failed, size = _receive_frame(self._socket, REPLY)
                if size > MAX_ROWS * self._row_bytes:
                    raise EOFError(f"it sent a reply of {size} bytes")
                data = _receive(self._socket, size)
                reply = self._waiting.pop(number, None)
                if reply is None:
                    continue
                if failed:
                    reply.set_exception(
                        ResourceError(f"the owner of Engram rows at {self._address}: {data.tobytes().decode()}")
                    )
                else:
                    reply.set_result(data)
        except Exception as error:  # whatever it is: nobody reads replies any more
            self.broken = True
            self._fail(str(error) or type(error).__name__)
        finally:
            self._socket.close()

    def _fail(self, why: str) -> None:
        while self._waiting:
            with suppress(KeyError):
                _, reply = self._waiting.popitem()
                text = f"the owner of Engram rows at {self._address} is gone ({why}); start it again"
                reply.set_exception(ResourceError(text))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False  # binding will say what is wrong with it


def _may_connect(peer: socket.socket) -> bool:
    """Whether the other side of a Unix socket is of our user, as the kernel says; of TCP nothing is known."""
    if peer.family != socket.AF_UNIX:
        return True
    _, user, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return bool(user == os.geteuid())


def _receive(peer: socket.socket, size: int) -> Rows:
    """The next `size` bytes. EOFError if the other side has closed."""
    data = np.empty(size, np.uint8)
    left = data.data
    while left:
        received = peer.recv_into(left)
        if not received:
            raise EOFError("closed")
        left = left[received:]
    return data


def _receive_frame(peer: socket.socket, frame: struct.Struct) -> tuple[Any, ...]:
    return frame.unpack(_receive(peer, frame.size).tobytes())


def _without_delay(peer: socket.socket) -> None:
    if peer.family == socket.AF_INET:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _left(until: float) -> float:
    """Seconds until then, a moment at least, since none would mean not to wait for what is there already."""
    return max(until - monotonic(), 0.001)
