"""A request is immutable and knows how much of it the client sent."""

from __future__ import annotations

import msgspec
import pytest

from rackserve.base.ids import Rank
from rackserve.base.request import Placement, Request, SamplingParams, Usage


def test_delivered_output_is_not_part_of_the_prompt_the_client_sent() -> None:
    request = Request("r", "s", b"", b"", 12, 4, attempt=2, num_emitted=3)
    assert (request.num_prompt_tokens, request.key) == (9, ("r", 2))
    assert Placement("r", 2, Rank("prefill0"), Rank("decode0"), 0, 12).key == request.key


def test_a_request_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Request("r", "s", b"", b"", 1, 1).attempt = 2  # type: ignore[misc]


def test_fields_left_at_their_defaults_cost_no_bytes() -> None:
    plain = Request("r", "s", b"", b"", 1, 1)
    seeded = Request("r", "s", b"", b"", 1, 1, sampling=SamplingParams(seed=7))
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    assert len(encode(plain)) < len(encode(seeded)) < 120
    assert decode(encode(seeded), type=Request) == seeded


def test_usage_is_compared_by_content() -> None:
    assert Usage(10, 4, 2) == Usage(10, 4, 2) != Usage(10, 5, 2)
