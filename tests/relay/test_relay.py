"""What all requests share: predictions are compared with what workers say, and a lost worker is forgotten."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rackserve.relay.config import RouteConfig, WorkerConfig
from rackserve.relay.placer import Booking
from rackserve.relay.prompts import Call
from rackserve.relay.relay import DOUBT_TOKENS, Relay
from rackserve.relay.usage import Usage
from tests.relay.rig import PROMPT, routing, run


def told(cached: int, *, claimed: int) -> list[str]:
    """What is logged when answers say that `cached` of 1000 tokens were cached and `claimed` were predicted."""

    async def test() -> None:
        relay = Relay(RouteConfig(workers=(WorkerConfig("http://w:1"),)))
        rank = relay.fleet.workers[0].config.ranks[0]
        booking = Booking(("", 1), rank, None, Call("m", "", b"", 1000), claimed, 0)
        for _ in range(DOUBT_TOKENS // 1000):
            relay.told(booking, Usage(1000, cached))
        relay.told(booking, None)
        await relay.aclose()

    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler, log = Keep(), logging.getLogger("rackserve.route")
    log.addHandler(handler)
    try:
        asyncio.run(test())
    finally:
        log.removeHandler(handler)
    return records


def test_a_worker_whose_cache_is_not_what_is_believed_of_it_is_named_once() -> None:
    (line,) = told(0, claimed=900)
    assert "w:1" in line
    assert "0 % of its prompt tokens were cached, 90 % were predicted" in line


@pytest.mark.parametrize(("cached", "claimed"), [(900, 900), (800, 900), (0, 0)])
def test_small_differences_are_not_worth_a_line(cached: int, claimed: int) -> None:
    assert told(cached, claimed=claimed) == []


def test_text_keyed_in_spite_of_a_tokenizer_is_counted_by_reason() -> None:
    async def test() -> None:
        async with routing(1, tokenizer="numbers") as rig:
            for _ in range(2):
                await rig.post({"messages": [{"role": "user", "content": PROMPT}]}, "/v1/chat/completions")
            text = (await rig.client.get("/metrics")).text
            assert 'rackserve_route_keyed_by_text_total{reason="no_template"} 2.0' in text
            text = (await rig.client.get("/metrics")).text
            assert 'rackserve_route_keyed_by_text_total{reason="no_template"} 2.0' in text

    run(test)
