"""Single requests in the Mooncake format: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` and
`hash_ids` of 512-token blocks, which mean the same in the whole trace."""

from __future__ import annotations

import msgspec

from rackserve.base.units import NS_PER_MS
from rackserve.bench.id_chain import IdChain
from rackserve.bench.session import MAX_TIME_S, MAX_TOKENS, Session, TraceRequest

BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_decoder = msgspec.json.Decoder(_Line)


def parse_mooncake(raw: bytes, number: int, ids: IdChain) -> Session:
    """Line `number` of a trace as a session of one request, sent at its timestamp. `ids` is one chain for the whole trace.

    Raises ValueError (or msgspec's) with what is wrong.
    """
    line = _decoder.decode(raw)
    if not 0 <= line.timestamp <= MAX_TIME_S * 1_000:
        raise ValueError(f"`timestamp` must be from 0 to {MAX_TIME_S * 1_000:g} milliseconds, got {line.timestamp}")
    if not 1 <= line.input_length <= MAX_TOKENS or not 0 <= line.output_length <= MAX_TOKENS:
        raise ValueError(f"`input_length` must be at least 1 and `output_length` at least 0, both at most {MAX_TOKENS}")
    hash_ids = ids.listed(line.hash_ids, line.input_length)
    request = TraceRequest(round(line.timestamp * NS_PER_MS), 0, line.input_length, line.output_length, hash_ids)
    return Session(f"line{number:06}", ids.block_tokens, (request,), shared=True)
