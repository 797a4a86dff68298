"""The wire form of KV events: every form vLLM has had is read, and losses can be made good."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ResourceError
from rackserve.live.kv_events import (
    NUMBER_BYTES,
    REPLAY_END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvPublisher,
    decode_batch,
    encode_batch,
)

pack = msgspec.msgpack.encode
HASHES = st.lists(st.one_of(st.integers(0, 2**64 - 1), st.binary(min_size=32, max_size=32)), min_size=1, max_size=4)
EVENTS = st.one_of(
    st.builds(
        BlockStored,
        HASHES,
        st.none() | st.binary(min_size=32, max_size=32),
        st.lists(st.integers(0, 2**31 - 1), max_size=8),
        st.integers(1, 64),
        medium=st.sampled_from(["GPU", "CPU", None]),
        lora_name=st.sampled_from([None, "a"]),
        extra_keys=st.none() | st.just([["salt"], None]),
    ),
    st.builds(BlockRemoved, HASHES, st.sampled_from(["GPU", None])),
    st.just(AllBlocksCleared()),
)


def same(a: KvEvent, b: KvEvent) -> bool:
    return isinstance(a, type(b)) and msgspec.structs.asdict(a) == msgspec.structs.asdict(b)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=4), st.sampled_from(["maps", "arrays"]), st.none() | st.integers(0, 7))
def test_what_is_written_is_read_in_either_form(events: list[KvEvent], form: str, rank: int | None) -> None:
    batch = decode_batch(encode_batch(1.5, events, rank, form))  # type: ignore[arg-type]
    assert batch.ts == 1.5
    assert batch.dp_rank == rank
    assert batch.num_unread == 0
    assert len(batch.events) == len(events)
    assert all(map(same, batch.events, events))


def test_the_short_arrays_of_old_publishers_are_read() -> None:
    raw = pack([1.0, [["BlockStored", [7], None, [1, 2], 2, None], ["BlockRemoved", [7]], ["AllBlocksCleared"]]])
    stored, removed, cleared = decode_batch(raw).events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.token_ids, stored.medium) == ([7], [1, 2], None)
    assert isinstance(removed, BlockRemoved)
    assert isinstance(cleared, AllBlocksCleared)


def test_a_batch_that_is_a_map_with_fields_of_a_newer_publisher_is_read() -> None:
    event = {"type": "BlockStored", "block_hashes": [b"h"], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    raw = pack({"ts": 2.0, "events": [{**event, "ownership": "x"}], "data_parallel_rank": 3, "more": 1})
    batch = decode_batch(raw)
    assert batch.dp_rank == 3
    assert isinstance(batch.events[0], BlockStored)


def test_an_event_of_an_unknown_kind_hides_no_other() -> None:
    raw = pack([1.0, [["BlockMoved", 1], {"type": "BlockRemoved", "block_hashes": [1]}, {"type": "Other"}, []]])
    batch = decode_batch(raw)
    assert [type(event) for event in batch.events] == [BlockRemoved]
    assert batch.num_unread == 3


@pytest.mark.parametrize("raw", [b"", b"\xc1", pack(3), pack([1.0]), pack({"ts": "x", "events": []})])
def test_what_is_no_batch_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_batch(raw)


async def published() -> None:
    publisher = KvPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", kept=3)
    context = zmq.asyncio.Context()
    subscriber, asking = context.socket(zmq.SUB), context.socket(zmq.REQ)
    subscriber.subscribe(b"")
    subscriber.connect(publisher.endpoint)
    asking.connect(publisher.replay_endpoint)
    try:
        for _ in range(1000):
            publisher.publish(b"early")
            if await subscriber.poll(1):
                break
        while await subscriber.poll(50):
            await subscriber.recv_multipart()
        first = publisher.number
        for payload in (b"a", b"b", b"c", b"d"):
            publisher.publish(payload)
        got = [await subscriber.recv_multipart() for _ in range(4)]
        assert got == [[b"", (first + at).to_bytes(8, "big"), bytes([97 + at])] for at in range(4)]

        await asking.send((first).to_bytes(NUMBER_BYTES, "big"))
        answers = [await asking.recv_multipart()]
        assert answers == [[(first + 1).to_bytes(8, "big"), b"b"]]  # `kept` bounds it; a REQ socket takes one answer
        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay_endpoint)
        await dealer.send_multipart((b"", b"not a number"))
        await dealer.send_multipart((b"", (first + 3).to_bytes(NUMBER_BYTES, "big")))
        assert [await dealer.recv_multipart() for _ in range(2)] == [
            [b"", (first + 3).to_bytes(8, "big"), b"d"],
            [b"", REPLAY_END, b""],
        ]
        assert publisher.num_dropped == 1
        with pytest.raises(ResourceError, match="choose another endpoint"):
            KvPublisher(publisher.endpoint)
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_batches_are_numbered_and_replayed_as_far_as_they_are_kept() -> None:
    asyncio.run(asyncio.wait_for(published(), 20))
