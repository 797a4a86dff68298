"""What a worker's prefix cache holds, as other routers hear it: vLLM's KV events, read in every form it has had, and written.

A message on the PUB socket has three frames: topic, number (8 bytes, big-endian, from 0), and a MessagePack batch of time,
events and data-parallel rank. Batch and events are arrays in older versions and tagged maps in newer ones; each may be either.
A ROUTER socket replays what a subscriber missed: asked with a number, it answers with all batches kept from that number on and
then `REPLAY_END`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec
import zmq

from rackserve.base.errors import ResourceError

BlockHash = int | bytes
"""A block's name in the publisher's own terms."""

GPU, HOST = "GPU", "CPU"
"""Media of a block: device memory, and any slower place it can be fetched from."""

NUMBER_BYTES = 8
REPLAY_END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
LARGEST_BATCH = 64 << 20
LARGEST_REQUEST = 1024

REPLAYS_PER_TURN = 4
"""Requests for a replay that are answered before the loop serves others; each may be for all batches that are kept."""

Form = Literal["maps", "arrays"]
"""How events are written: tagged maps, or arrays by position."""


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks after `parent_block_hash` (None: from the start) are in the cache; `token_ids` are those of all of them in order.

    extra_keys          per block whatever else its hash depends on: a salt, images, an adapter
    group_idx           which of a hybrid model's groups of layers; `kv_cache_spec_kind` says of what kind that group is
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """These blocks are gone from `medium`; blocks after them may still be there."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is in the cache any more."""


class _StoredRow(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    pass


class _RemovedRow(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedRow(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _BatchRow(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _BatchMap(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class KvBatch(msgspec.Struct, frozen=True):
    """Events of one moment `ts` (seconds, by the publisher's clock), in order. `num_unread`: those of no kind known here."""

    ts: float
    events: tuple[KvEvent, ...]
    dp_rank: int | None = None
    num_unread: int = 0


_rows = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_maps = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_batch_rows = msgspec.msgpack.Decoder(_BatchRow)
_batch_maps = msgspec.msgpack.Decoder(_BatchMap)
_encoder = msgspec.msgpack.Encoder()


def _is_map(first: int) -> bool:
    """Whether a MessagePack value that begins with this byte is a map."""
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


def decode_batch(payload: bytes) -> KvBatch:
    """A batch in any form. Raises msgspec.DecodeError for anything else.

    An event of an unknown kind or shape is passed over and counted: a newer publisher must not silence what is understood.
    """
    if len(payload) > LARGEST_BATCH:
        raise msgspec.DecodeError(f"a batch of {len(payload)} bytes; at most {LARGEST_BATCH} are read")
    batch = (_batch_maps if payload and _is_map(payload[0]) else _batch_rows).decode(payload)
    events: list[KvEvent] = []
    for raw in batch.events:
        view = bytes(raw)
        try:
            events.append((_maps if _is_map(view[0]) else _rows).decode(view))
        except msgspec.DecodeError:
            continue
    return KvBatch(batch.ts, tuple(events), batch.data_parallel_rank, len(batch.events) - len(events))


def encode_batch(ts: float, events: Sequence[KvEvent], dp_rank: int | None = None, form: Form = "maps") -> bytes:
    """A batch as an array of time, events and rank; the events as tagged maps, as newer readers want them, or as arrays."""
    if form == "maps":
        return _encoder.encode([ts, events, dp_rank])
    return _encoder.encode([ts, [_row(event) for event in events], dp_rank])


def _row(event: KvEvent) -> KvEvent:
    if isinstance(event, BlockStored):
        return _StoredRow(**msgspec.structs.asdict(event))
    return _RemovedRow(**msgspec.structs.asdict(event)) if isinstance(event, BlockRemoved) else _ClearedRow()


class KvPublisher:
    """The two sockets of a publisher, on the running event loop. Never blocks: a subscriber that is too slow misses batches and
    sees it by their numbers.

    `num_dropped` counts requests for a replay that were not understood.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "", *, kept: int = 10_000, queued: int = 100_000) -> None:
        """Bind both, such as `tcp://127.0.0.1:5557`. `kept`: batches to replay from. ResourceError names an address in use."""
        self._context = zmq.Context(1)
        self._context.linger = 0
        self._pub = self._context.socket(zmq.PUB)
        self._pub.sndhwm = queued
        self._pub.set(zmq.MAXMSGSIZE, LARGEST_REQUEST)  # what subscribers say, too, is no longer than that
        self._replay: zmq.Socket[bytes] | None = None
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=kept)
        self._loop = asyncio.get_running_loop()
        self.number = 0
        self.num_dropped = 0
        try:
            self._bind(self._pub, endpoint)
            if replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.set(zmq.MAXMSGSIZE, LARGEST_REQUEST)
                self._bind(self._replay, replay_endpoint)
                self._loop.add_reader(self._replay.fileno(), self._on_request)
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where subscribers connect."""
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str:
        """Where replays are asked for, or empty."""
        return "" if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ResourceError(f"{endpoint} cannot be listened on ({error}); choose another endpoint for KV events") from error

    def publish(self, payload: bytes) -> None:
        """Send one encoded batch under the next number."""
        number = self.number.to_bytes(NUMBER_BYTES, "big")
        self.number += 1
        self._kept.append((number, payload))
        self._pub.send_multipart((b"", number, payload), zmq.NOBLOCK)
        if self._replay is not None:
            self._on_request()  # its descriptor tells of requests once only

    def _on_request(self) -> None:
        replay = self._replay
        left = REPLAYS_PER_TURN
        while replay is not None and not replay.closed and int(replay.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            if not left:
                self._loop.call_soon(self._on_request)
                return
            left -= 1
            frames = replay.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
                self.num_dropped += 1
                continue
            first = bytes(frames[2])
            for number, payload in self._kept:
                if number >= first:
                    replay.send_multipart((frames[0], b"", number, payload), zmq.NOBLOCK)
            replay.send_multipart((frames[0], b"", REPLAY_END, b""), zmq.NOBLOCK)

    def close(self) -> None:
        """Close both sockets."""
        if self._replay is not None and not self._replay.closed:
            self._loop.remove_reader(self._replay.fileno())
            self._replay.close(0)
        self._pub.close(0)
        self._context.term()
