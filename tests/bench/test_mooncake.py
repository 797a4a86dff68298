from __future__ import annotations

import json

import pytest

from rackserve.base.units import to_ns
from rackserve.bench.id_chain import IdChain
from rackserve.bench.mooncake import BLOCK_TOKENS, parse_mooncake
from rackserve.bench.session import Session, TraceRequest
from tests.bench.toys import ids


def parse(chain: IdChain, number: int, at: float, tokens: int, outputs: int, *hash_ids: int) -> Session:
    line = {"timestamp": at, "input_length": tokens, "output_length": outputs, "hash_ids": hash_ids}
    return parse_mooncake(json.dumps(line).encode(), number, chain)


def test_a_line_is_a_session_of_one_request_at_its_timestamp_with_shared_ids() -> None:
    chain = IdChain(BLOCK_TOKENS)
    first = parse(chain, 1, 0, 1000, 5, 0, 1)
    second = parse(chain, 2, 2500, 1536, 7, 0, 2, 3)
    assert first == Session("line000001", 512, (TraceRequest(0, 0, 1000, 5, ids(0)),), shared=True)
    assert second.entries == (TraceRequest(to_ns(2.5), 0, 1536, 7, ids(0, 2, 3)),)


def test_ids_are_checked_over_the_whole_trace() -> None:
    chain = IdChain(BLOCK_TOKENS)
    parse(chain, 1, 0, 1024, 5, 0, 1)
    with pytest.raises(ValueError, match="hash id 1 follows two different blocks"):
        parse(chain, 2, 0, 1024, 5, 2, 1)


@pytest.mark.parametrize(
    ("at", "tokens", "outputs", "says"), [(-1, 512, 1, "timestamp"), (0, 0, 1, "input"), (0, 512, -1, "output")]
)
def test_numbers_that_cannot_be_are_refused(at: float, tokens: int, outputs: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(IdChain(BLOCK_TOKENS), 1, at, tokens, outputs, 0)
