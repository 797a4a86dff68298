"""What a stranger may send to a port, and how to send it."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL".ljust(55, b"\0")
"""How a peer of the messaging protocol begins."""

PATIENCE_S = 0.3
MIB = 1 << 20


class Runs:
    """Makes a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._canary}",)


def junk(canary: Path) -> Iterator[bytes]:
    """Bytes at random, lengths beyond all bounds, other protocols, and pickles that would make `canary`."""
    draw = Random(7)
    for size in (1, 9, 64, 1000, 70_000):
        yield draw.randbytes(size)
    pickled = pickle.dumps(Runs(canary))
    yield pickled
    yield b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    yield b"\xff" * 64
    for body in (pickled, draw.randbytes(200)):
        yield GREETING + b"\x00" + bytes([min(len(body), 255)]) + body
    for flags in (b"\x02", b"\x03", b"\x06"):  # a frame, a frame with more behind it, a command: of 2**62 bytes
        yield GREETING + flags + (1 << 62).to_bytes(8, "big")
    yield GREETING + ready(b"DEALER") + b"\x02" + (1 << 40).to_bytes(8, "big")
    yield GREETING + ready(b"DEALER") + (b"\x01\x00" * 2000) + b"\x00\x00"


def ready(kind: bytes) -> bytes:
    """The command that ends a peer's introduction as a socket of this kind."""
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return b"\x04" + bytes([len(body)]) + body


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send it, hear what comes for a moment, and go."""
    with suppress(OSError, TimeoutError):
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            while await reader.read(1 << 16):
                pass
    writer.close()


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
