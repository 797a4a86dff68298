"""A worker that answers as OpenAI-compatible servers do, with a real least-recently-used prefix cache of whole blocks.

The prompt of a completion is words; a token is a word. Answers tell how many of the prompt's tokens were cached.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rackserve.live.kv_events import BlockHash, BlockRemoved, BlockStored, KvEvent

Tell = Callable[[list[KvEvent]], None]


class BlockCache:
    """Blocks of `block_tokens` tokens, at most `max_blocks`, the least recently used given up first, tails before heads."""

    def __init__(self, block_tokens: int, max_blocks: int, tell: Tell = lambda events: None) -> None:
        self.block_tokens = block_tokens
        self.max_blocks = max_blocks
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self._tell = tell

    def hashes(self, tokens: list[int]) -> list[bytes]:
        """Names of the full blocks of `tokens`."""
        parent, names = b"", []
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            block = tokens[start : start + self.block_tokens]
            parent = hashlib.sha256(parent + repr(block).encode()).digest()
            names.append(parent)
        return names

    def use(self, tokens: list[int]) -> int:
        """Compute a prompt: how many of its tokens were cached before."""
        names = self.hashes(tokens)
        usable = names[: max(0, len(tokens) - 1) // self.block_tokens]
        cached = next((at for at, name in enumerate(usable) if name not in self.blocks), len(usable))
        fresh = next((at for at, name in enumerate(names) if name not in self.blocks), len(names))
        for name in reversed(names):  # the head is used last, so the tail goes first
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        events: list[KvEvent] = []
        if fresh < len(names):
            step = self.block_tokens
            parent: BlockHash | None = names[fresh - 1] if fresh else None
            ids = tokens[fresh * step : len(names) * step]
            events.append(BlockStored(list(names[fresh:]), parent, ids, step, medium="GPU"))
        gone: list[BlockHash] = []
        while len(self.blocks) > self.max_blocks:
            gone.append(self.blocks.popitem(last=False)[0])
        if gone:
            events.append(BlockRemoved(gone, "GPU"))
        if events:
            self._tell(events)
        return cached * self.block_tokens


@dataclass
class Seen:
    """A request as the worker got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, object]


@dataclass
class StubWorker:
    """One server; set the fields to make it behave otherwise.

    status     what it answers with, if not 200
    cut        break off after so many pieces of a stream
    hold       answers wait for this event before their first byte
    context    what its list of models says of it
    key        without it models are not listed
    """

    model: str = "m"
    block_tokens: int = 4
    max_blocks: int = 10_000
    tell: Tell = lambda events: None
    status: int = 200
    cut: int | None = None
    hold: asyncio.Event | None = None
    kv_params: object = None
    key: str = ""
    context: int | None = None
    seen: list[Seen] = field(default_factory=list)
    num_open: int = 0
    num_looks: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self.cache = BlockCache(self.block_tokens, self.max_blocks, self.tell)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the port of the time before if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything, as a process that dies does."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            self._server = None
            self.cache.blocks.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
                raw = await reader.readexactly(int(headers.get("content-length", "0")))
                if method == "GET":
                    self.num_looks += 1
                    closed = self.key and path != "/health" and headers.get("authorization") != f"Bearer {self.key}"
                    listed = (
                        b"{}"
                        if path == "/health" or closed
                        else msgspec.json.encode({"data": [{"id": self.model, "max_model_len": self.context}]})
                    )
                    await self._reply(writer, 401 if closed else 200, listed)
                    continue
                self.seen.append(Seen(path, headers, msgspec.json.decode(raw)))
                self.num_open += 1
                answering = asyncio.create_task(self._answer(writer, msgspec.json.decode(raw)))
                watching = asyncio.create_task(reader.read(1))
                try:
                    await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
                    if not answering.done():  # the client left
                        answering.cancel()
                        return
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
                    if not answering.result():
                        writer.transport.abort()
                        return
                finally:
                    answering.cancel()
                    self.num_open -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nx-stub: yes\r\ncontent-length: %d\r\n\r\n"
            % (status, len(body))
            + body
        )
        await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> bool:
        """False if it breaks off."""
        if self.hold is not None:
            await self.hold.wait()
        if self.status != 200:
            await self._reply(writer, self.status, b'{"error": {"message": "stub says %d"}}' % self.status)
            return True
        prompt = body.get("prompt") or body.get("input") or "".join(map(str, body.get("messages", [])))  # type: ignore[arg-type]
        tokens = prompt if isinstance(prompt, list) else [hash_word(word) for word in str(prompt).split()]
        cached = self.cache.use(tokens)
        usage = {"prompt_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": cached}}
        if not body.get("stream"):
            told = {"choices": [{"text": "x"}], "usage": usage, "kv_transfer_params": self.kv_params}
            await self._reply(writer, 200, msgspec.json.encode(told))
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        pieces = [b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(4)]
        pieces += [b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\n", b"data: [DONE]\n\n"]
        for number, piece in enumerate(pieces):
            if number == self.cut:
                await writer.drain()
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def hash_word(word: str) -> int:
    """The token id of a word: numbers are themselves."""
    return int(word) if word.isdecimal() else int.from_bytes(hashlib.sha256(word.encode()).digest()[:3], "big")
