"""Workers for comparing routers: `python stub_workers.py PORT BLOCKS` serves on consecutive ports from PORT until it is ended.

Each has a real least-recently-used prefix cache of BLOCKS blocks, computes one prompt after the other at a fixed speed, says
how much was cached, publishes KV events NUM_WORKERS ports higher and replays them as many higher again.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections import OrderedDict

import msgspec

from rackserve.live.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvPublisher, encode_batch

NUM_WORKERS = 4
BLOCK = 16
TOKEN_US = 10.0
MODEL = "tiny"
IDS = {ord(" "): 0} | {byte: at for at, byte in enumerate(b"abcdefghijklmnopqrstuvwxyz|", 1)}
"""A token is a character. The bar is a special token, as chat templates set between turns."""


class Worker:
    """One server: an LRU cache of `max_blocks` blocks, and a prefill that does one prompt after the other."""

    def __init__(self, endpoint: str, replay: str, max_blocks: int) -> None:
        self.publisher = KvPublisher(endpoint, replay)
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.max_blocks = max_blocks
        self.free_at = 0.0
        self.reset()

    def reset(self) -> None:
        self.blocks.clear()
        self.tell([AllBlocksCleared()])
        self.num_requests = self.prompt_tokens = self.cached_tokens = 0

    def tell(self, events: list[KvEvent]) -> None:
        self.publisher.publish(encode_batch(time.time(), events, 0))

    def compute(self, prompt: bytes) -> tuple[int, float]:
        """Cached tokens of a prompt, and when it is done."""
        names, name = [], b""
        for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
            name = hashlib.blake2b(name + prompt[start : start + BLOCK], digest_size=32).digest()
            names.append(name)
        fresh = next((at for at, name in enumerate(names) if name not in self.blocks), len(names))
        cached = min(fresh, (len(prompt) - 1) // BLOCK) * BLOCK
        for name in reversed(names):  # the head is used last, so the tail goes first
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        events: list[KvEvent] = []
        if fresh < len(names):
            ids = [IDS[byte] for byte in prompt[fresh * BLOCK : len(names) * BLOCK]]
            parent = names[fresh - 1] if fresh else None
            events.append(BlockStored(list(names[fresh:]), parent, ids, BLOCK, medium="GPU"))
        gone = []
        while len(self.blocks) > self.max_blocks:
            gone.append(self.blocks.popitem(last=False)[0])
        if gone:
            events.append(BlockRemoved(list(gone), "GPU"))
        if events:
            self.tell(events)
        self.num_requests += 1
        self.prompt_tokens += len(prompt)
        self.cached_tokens += cached
        self.free_at = max(self.free_at, time.monotonic()) + (len(prompt) - cached) * TOKEN_US * 1e-6
        return cached, self.free_at

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
                _, path, _ = head[0].split(" ")
                fields = dict(line.split(":", 1) for line in head[1:] if line)
                raw = await reader.readexactly(int(fields.get("content-length", "0")))
                writer.write(await self.answer(path.split("?")[0], raw))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, path: str, raw: bytes) -> bytes:
        if path == "/v1/completions":
            body = msgspec.json.decode(raw)
            prompt = body["prompt"].encode()
            cached, due = self.compute(prompt)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": cached}}
            parts = [{"choices": [{"index": 0, "text": "a", "finish_reason": None}]}] * 4
            parts += [{"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
            lines = [
                b"data: " + msgspec.json.encode({"id": "c", "object": "text_completion", "model": MODEL, **p}) for p in parts
            ]
            pieces = b"".join(b"%x\r\n%b\n\n\r\n" % (len(line) + 2, line) for line in [*lines, b"data: [DONE]"])
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            return head + pieces + b"0\r\n\r\n"
        if path == "/reset":
            self.reset()
        told: object = {}
        if path == "/tokenize":
            text = msgspec.json.decode(raw).get("prompt", "")
            told = {"tokens": [IDS[byte] for byte in text.encode()], "count": len(text), "max_model_len": 1 << 20}
        elif path == "/v1/models":
            told = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "stub", "max_model_len": 1 << 20}]}
        elif path == "/stats":
            told = [self.num_requests, self.prompt_tokens, self.cached_tokens]
        elif path in ("/get_server_info", "/server_info", "/get_model_info", "/model_info"):
            told = {"model_path": MODEL, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1, "is_generation": True}
        body = msgspec.json.encode(told)
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def stub(ports: list[int], max_blocks: int) -> None:
    """Workers on `ports`; each publishes on the next port but NUM_WORKERS, and replays on the one after those."""
    for port in ports:
        events, replay = (f"tcp://127.0.0.1:{port + step * NUM_WORKERS}" for step in (1, 2))
        await asyncio.start_server(Worker(events, replay, max_blocks).serve, "127.0.0.1", port, limit=1 << 24)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    first = int(sys.argv[1])
    asyncio.run(stub(list(range(first, first + NUM_WORKERS)), int(sys.argv[2])))
